package sim

import (
	"encoding/json"
	"net/http"
)

// readChat reads the body of a chat, and makes its prompt.
func (w *worker) readChat(rw http.ResponseWriter, r *http.Request) (*generation, []uint32, error) {
	var req struct {
		generation
		conversation
	}
	if err := readBody(rw, r, &req); err != nil {
		return nil, nil, err
	}
	if err := w.checkModel(req.Model); err != nil {
		return nil, nil, err
	}
	prompt, err := req.tokens()
	return &req.generation, prompt, err
}

// readCompletion reads the body of a completion, and makes its prompts.
func (w *worker) readCompletion(rw http.ResponseWriter, r *http.Request) (*generation, [][]uint32, error) {
	var req struct {
		generation
		Prompt json.RawMessage `json:"prompt"`
	}
	if err := readBody(rw, r, &req); err != nil {
		return nil, nil, err
	}
	if err := w.checkModel(req.Model); err != nil {
		return nil, nil, err
	}
	prompts, err := parsePrompts(req.Prompt)
	return &req.generation, prompts, err
}

// chat serves POST /v1/chat/completions.
func (w *worker) chat(rw http.ResponseWriter, r *http.Request) error {
	g, prompt, err := w.readChat(rw, r)
	if err != nil {
		return err
	}
	return w.generate(rw, r, g, [][]uint32{prompt}, chatFormat)
}

// completions serves POST /v1/completions.
func (w *worker) completions(rw http.ResponseWriter, r *http.Request) error {
	g, prompts, err := w.readCompletion(rw, r)
	if err != nil {
		return err
	}
	g.MaxCompletionTokens = nil // a chat key
	return w.generate(rw, r, g, prompts, completionFormat)
}

// generate answers prompts with text. Everything that can be refused is refused before the
// first byte of an answer.
func (w *worker) generate(rw http.ResponseWriter, r *http.Request, g *generation, prompts [][]uint32, f format) error {
	rank, err := w.rankHeader(r)
	if err != nil {
		return err
	}
	n, err := g.n()
	if err != nil {
		return err
	}
	if len(prompts)*n > maxChoices {
		return badRequest("%d prompts with n %d are more than %d sequences.", len(prompts), n, maxChoices)
	}
	type size struct {
		tokens int
		own    bool
	}
	sizes := make([]size, len(prompts))
	for i, p := range prompts {
		if sizes[i].tokens, sizes[i].own, err = g.outputTokens(len(p), f.tokens(), w.server.cfg.MaxModelLen); err != nil {
			return err
		}
	}
	c := w.newCall(r, f.idPrefix(), g)
	c.per = n
	defer c.close()
	for i, p := range prompts {
		if err := c.start(p, n, sizes[i].tokens, rank, sizes[i].own); err != nil {
			return err
		}
	}
	if g.Stream {
		return c.stream(rw, r, g.StreamOptions, f)
	}
	if err := c.wait(r.Context()); err != nil {
		return err
	}
	if err := writeJSON(rw, http.StatusOK, c.answer(f)); err != nil {
		return err
	}
	c.whole = true
	return nil
}

// format tells the two text routes apart.
type format uint8

const (
	chatFormat format = iota
	completionFormat
)

func (f format) idPrefix() string {
	if f == chatFormat {
		return "chatcmpl-"
	}
	return "cmpl-"
}

// tokens is the output length of a request that names none.
func (f format) tokens() int {
	if f == chatFormat {
		return defaultChatTokens
	}
	return defaultCompletionTokens
}

// answer is the body of a unary answer. Every choice must have ended.
func (c *call) answer(f format) any {
	type said struct {
		Role    string  `json:"role"`
		Content string  `json:"content"`
		Refusal *string `json:"refusal"`
	}
	type one struct {
		Index        int       `json:"index"`
		Message      *said     `json:"message,omitempty"`
		Text         *string   `json:"text,omitempty"`
		Logprobs     *struct{} `json:"logprobs"`
		FinishReason string    `json:"finish_reason"`
		StopReason   *string   `json:"stop_reason"`
	}
	choices := make([]one, len(c.choices))
	for i, ch := range c.choices {
		generated, reason := ch.state()
		text := ch.text.text(generated)
		choices[i] = one{Index: i, FinishReason: ch.finishReason(reason)}
		if f == chatFormat {
			choices[i].Message = &said{Role: "assistant", Content: text}
		} else {
			choices[i].Text = &text
		}
	}
	return struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		Model   string `json:"model"`
		Choices []one  `json:"choices"`
		Usage   usage  `json:"usage"`
	}{c.id, f.object(false), c.created, c.worker.server.cfg.Model, choices, c.usage()}
}

func (f format) object(chunk bool) string {
	switch {
	case f == completionFormat:
		return "text_completion"
	case chunk:
		return "chat.completion.chunk"
	}
	return "chat.completion"
}
