package sim

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
)

const (
	maxBody = 64 << 20
	maxN    = 128
	// maxChoices bounds the sequences of one request: prompts times n.
	maxChoices = 2048

	defaultChatTokens       = 256
	defaultCompletionTokens = 16 // vLLM's
	imageTokens             = 225
)

// generation is what chat and completion requests have in common. Unknown keys are ignored.
type generation struct {
	Model               string          `json:"model"`
	Stream              bool            `json:"stream"`
	StreamOptions       *streamOptions  `json:"stream_options"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	N                   *int            `json:"n"`
	Priority            int             `json:"priority"`
	IgnoreEOS           bool            `json:"ignore_eos"`
	Stop                json.RawMessage `json:"stop"` // generated text never contains one
}

type streamOptions struct {
	IncludeUsage         bool `json:"include_usage"`
	ContinuousUsageStats bool `json:"continuous_usage_stats"`
}

// readBody decodes the JSON body of r into v.
func readBody(rw http.ResponseWriter, r *http.Request, v any) error {
	body, err := io.ReadAll(http.MaxBytesReader(rw, r.Body, maxBody))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return badRequest("The request body is not what this route takes: %v", err)
	}
	return nil
}

// checkModel takes the served name or none, as vLLM does.
func (w *worker) checkModel(name string) error {
	if name == "" || name == w.server.cfg.Model {
		return nil
	}
	return &apiError{http.StatusNotFound, "NotFoundError", "The model `" + name + "` does not exist."}
}

func (g *generation) n() (int, error) {
	switch {
	case g.N == nil:
		return 1, nil
	case *g.N < 1 || *g.N > maxN:
		return 0, badRequest("n must be within 1..%d, got %d.", maxN, *g.N)
	}
	return *g.N, nil
}

// outputTokens is how many tokens a prompt gets, and whether that is the model's own choice
// and not a limit.
func (g *generation) outputTokens(prompt, byDefault, maxModelLen int) (n int, own bool, err error) {
	limit := g.MaxCompletionTokens
	if limit == nil {
		limit = g.MaxTokens
	}
	switch {
	case prompt >= maxModelLen:
		return 0, false, badRequest("This model's maximum context length is %d tokens. However, your request has %d input tokens. "+
			"Please reduce the length of the input messages.", maxModelLen, prompt)
	case limit == nil && byDefault > maxModelLen-prompt:
		return maxModelLen - prompt, false, nil
	case limit == nil:
		return byDefault, byDefault == defaultChatTokens && !g.IgnoreEOS, nil
	case *limit < 1:
		return 0, false, badRequest("max_tokens must be at least 1, got %d.", *limit)
	case *limit > maxModelLen-prompt:
		return 0, false, badRequest("This model's maximum context length is %d tokens. However, you requested %d tokens "+
			"(%d in the messages, %d in the completion). Please reduce the length of the messages or completion.",
			maxModelLen, prompt+*limit, prompt, *limit)
	}
	return *limit, false, nil
}

// parsePrompts reads a prompt as the completions and embeddings routes take it: text, texts,
// token IDs or lists of token IDs.
func parsePrompts(raw json.RawMessage) ([][]uint32, error) {
	inner := bytes.TrimLeft(bytes.TrimPrefix(raw, []byte("[")), " \t\r\n")
	var prompts [][]uint32
	var err error
	switch {
	case len(raw) == 0 || len(inner) == 0:
	case raw[0] == '"':
		var text string
		err = json.Unmarshal(raw, &text)
		prompts = [][]uint32{appendText(nil, text)}
	case inner[0] == '"':
		var texts []string
		err = json.Unmarshal(raw, &texts)
		for _, text := range texts {
			prompts = append(prompts, appendText(nil, text))
		}
	case inner[0] == '[':
		err = json.Unmarshal(raw, &prompts)
	default:
		var ids []uint32
		err = json.Unmarshal(raw, &ids)
		prompts = [][]uint32{ids}
	}
	if err != nil {
		return nil, badRequest("The prompt is not text, token IDs or a list of either: %v", err)
	}
	for _, p := range prompts {
		if len(p) == 0 {
			return nil, badRequest("The decoder prompt cannot be empty.")
		}
	}
	if len(prompts) == 0 || len(prompts) > maxChoices {
		return nil, badRequest("A request takes 1 to %d prompts, not %d.", maxChoices, len(prompts))
	}
	return prompts, nil
}

// conversation is what a chat request says and what the tokenize route takes of it.
type conversation struct {
	Messages []message       `json:"messages"`
	Tools    json.RawMessage `json:"tools"`
	// vLLM's defaults are true and false.
	AddGenerationPrompt  *bool `json:"add_generation_prompt"`
	ContinueFinalMessage bool  `json:"continue_final_message"`
}

type message struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

type part struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// tokens renders the chat template.
func (c *conversation) tokens() ([]uint32, error) {
	generate := c.AddGenerationPrompt == nil || *c.AddGenerationPrompt
	switch {
	case len(c.Messages) == 0:
		return nil, badRequest("messages must have at least one message.")
	case c.ContinueFinalMessage && c.AddGenerationPrompt != nil && generate:
		return nil, badRequest("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
	}
	var ids []uint32
	if given(c.Tools) {
		ids = appendEnd(appendText(appendHead(ids, "tools"), string(c.Tools)))
	}
	for i, m := range c.Messages {
		if m.Role == "" {
			return nil, badRequest("messages[%d] has no role.", i)
		}
		ids = appendHead(ids, m.Role)
		var err error
		if ids, err = appendContent(ids, m.Content); err != nil {
			return nil, badRequest("messages[%d].content is neither text nor a list of parts: %v", i, err)
		}
		if given(m.ToolCalls) {
			ids = appendText(ids, string(m.ToolCalls))
		}
		if i < len(c.Messages)-1 || !c.ContinueFinalMessage {
			ids = appendEnd(ids)
		}
	}
	if generate && !c.ContinueFinalMessage {
		ids = appendHead(ids, "assistant")
	}
	return ids, nil
}

// appendContent appends the tokens of a message's content. A part that is not text, such as
// an image, has a fixed number of tokens that depend on all of its JSON.
func appendContent(ids []uint32, content json.RawMessage) ([]uint32, error) {
	if !given(content) {
		return ids, nil
	}
	if content[0] == '"' {
		var text string
		if err := json.Unmarshal(content, &text); err != nil {
			return nil, err
		}
		return appendText(ids, text), nil
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(content, &parts); err != nil {
		return nil, err
	}
	for _, raw := range parts {
		var p part
		if err := json.Unmarshal(raw, &p); err != nil {
			return nil, err
		}
		if p.Type == "text" {
			ids = appendText(ids, p.Text)
			continue
		}
		id := tokenID(string(raw))
		for i := range uint32(imageTokens) {
			ids = append(ids, id+i)
		}
	}
	return ids, nil
}

func given(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }
