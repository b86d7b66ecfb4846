package tokenize

import (
	"encoding/binary"
	"encoding/json"
	"slices"

	"github.com/zeebo/xxh3"
)

// field is a key of a body that changes what the worker computes.
type field uint8

// The fields, in the order in which they enter a key. Not all engines know all of them.
const (
	messages field = iota
	prompt
	tools
	toolChoice
	chatTemplate
	chatTemplateKwargs
	addGenerationPrompt
	continueFinalMessage
	addSpecialTokens
	documents
	reasoningEffort
	mmProcessorKwargs
	truncatePromptTokens
	numFields
)

var fieldNames = [numFields]string{
	messages: "messages", prompt: "prompt", tools: "tools", toolChoice: "tool_choice", chatTemplate: "chat_template",
	chatTemplateKwargs: "chat_template_kwargs", addGenerationPrompt: "add_generation_prompt",
	continueFinalMessage: "continue_final_message", addSpecialTokens: "add_special_tokens", documents: "documents",
	reasoningEffort: "reasoning_effort", mmProcessorKwargs: "mm_processor_kwargs", truncatePromptTokens: "truncate_prompt_tokens",
}

// fieldOf is the field of a key, if a body of that kind has it.
func fieldOf(key []byte, chat bool) (field, bool) {
	switch string(key) {
	case "add_special_tokens":
		return addSpecialTokens, true
	case "truncate_prompt_tokens":
		return truncatePromptTokens, true
	case "prompt":
		return prompt, !chat
	}
	if !chat {
		return 0, false
	}
	switch string(key) {
	case "messages":
		return messages, true
	case "tools":
		return tools, true
	case "tool_choice":
		return toolChoice, true
	case "chat_template":
		return chatTemplate, true
	case "chat_template_kwargs":
		return chatTemplateKwargs, true
	case "add_generation_prompt":
		return addGenerationPrompt, true
	case "continue_final_message":
		return continueFinalMessage, true
	case "documents":
		return documents, true
	case "reasoning_effort":
		return reasoningEffort, true
	case "mm_processor_kwargs":
		return mmProcessorKwargs, true
	}
	return 0, false
}

// reading is where the fields are in a body, as the client wrote them.
type reading struct {
	values    [numFields][]byte // nil where one is left out or null
	model     [2]int            // where the model's name is, quotes included; both 0 if it is not there
	first     int               // where the first member begins
	prompts   int               // texts to be tokenised, at least 1
	media     bool              // messages hold something other than text
	truncated bool              // the worker drops tokens, which /tokenize does not
}

// read finds the fields of a body. It is false for a body that has no text to be tokenised: that is
// not JSON, or whose prompt is token IDs or embeddings.
func read(body []byte, chat bool) (r reading, ok bool) {
	c := cursor{b: body}
	embeds, conversation := false, false
	c.next()
	r.first = c.i + 1
	ok = c.object(func(key []byte) bool {
		c.next()
		from := c.i
		if chat && string(key) == "messages" {
			conversation = r.readMessages(&c)
		}
		if c.i == from && !c.skip() {
			return false
		}
		value := body[from:c.i]
		if string(value) == "null" {
			value = nil
		}
		if f, ok := fieldOf(key, chat); ok {
			r.values[f] = value // where a key is repeated the last one counts
			return true
		}
		switch string(key) {
		case "model":
			r.model = [2]int{from, c.i}
		case "prompt_embeds":
			embeds = value != nil
		}
		return true
	})
	if !ok || c.next() != 0 {
		return r, false
	}
	r.truncated = r.values[truncatePromptTokens] != nil
	if chat {
		r.prompts = 1
		return r, conversation
	}
	return r, !embeds && r.readPrompt()
}

// readPrompt counts the texts of a prompt.
func (r *reading) readPrompt() bool {
	c := cursor{b: r.values[prompt]}
	switch c.next() {
	case '"':
		r.prompts = 1
		return true
	case '[':
		return c.array(func() bool {
			_, ok := c.str()
			r.prompts++
			return ok
		}) && r.prompts > 0
	}
	return false
}

// only is the text of a prompt that is one, as JSON.
func (r *reading) only() []byte {
	v := r.values[prompt]
	c := cursor{b: v}
	if !c.take('[') {
		return v
	}
	c.next()
	from := c.i
	c.skip()
	return v[from:c.i]
}

// readMessages passes over messages, and looks for parts that are not text. If they are none it stays
// where it is.
func (r *reading) readMessages(c *cursor) bool {
	from := c.i
	r.media = false
	ok := c.array(func() bool {
		if c.next() != '{' {
			return false
		}
		return c.object(func(key []byte) bool {
			if string(key) != "content" || c.next() != '[' {
				return c.skip()
			}
			return c.array(func() bool {
				text, ok := c.textPart()
				r.media = r.media || !text
				return ok
			})
		})
	})
	if !ok {
		c.i = from
	}
	return ok
}

// textPart passes over a part of a message and tells whether it is text and nothing else.
func (c *cursor) textPart() (text, ok bool) {
	switch c.next() {
	case '"':
		_, ok = c.str()
		return true, ok
	case '{':
	default:
		return false, c.skip()
	}
	ok = c.object(func(key []byte) bool {
		if string(key) != "type" || c.next() != '"' {
			return c.skip()
		}
		kind, ok := c.str()
		switch string(kind) {
		case "text", "input_text", "output_text", "refusal", "thinking":
			text = true
		default:
			text = false
		}
		return ok
	})
	return text, ok
}

// key stands for a prompt: equal keys mean equal tokens.
type key struct{ hi, lo uint64 }

// keyOf hashes all that the tokens depend on. Values are hashed as they are written, so that the same
// prompt in another spelling has another key, and is asked for again. Lengths are hashed with them,
// so that no value can take the place of two.
func (t *Tokenizer) keyOf(p *Prompt, r *reading, generation uint64) key {
	var room [640]byte
	b := binary.LittleEndian.AppendUint64(room[:0], generation)
	for _, name := range [...]string{p.Model, p.Tenant, p.Served} {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(name)))
		b = append(b, name...)
	}
	if p.Chat {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	for f, v := range r.values {
		if v == nil {
			continue
		}
		h := xxh3.Hash128Seed(v, t.seed)
		b = append(b, byte(f))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(v)))
		b = binary.LittleEndian.AppendUint64(b, h.Hi)
		b = binary.LittleEndian.AppendUint64(b, h.Lo)
	}
	h := xxh3.Hash128Seed(b, t.seed)
	return key{h.Hi, h.Lo}
}

// appendRender appends the client's body with the model's name in the place of the client's word for it.
func (r *reading) appendRender(b, body []byte, model string) []byte {
	name := quoted(model)
	b = slices.Grow(b, len(body)+len(name)+len(`"model":,`))
	if r.model[1] > 0 {
		b = append(b, body[:r.model[0]]...)
		b = append(b, name...)
		return append(b, body[r.model[1]:]...)
	}
	b = append(b, body[:r.first]...)
	b = append(b, `"model":`...)
	b = append(b, name...)
	b = append(b, ',')
	return append(b, body[r.first:]...)
}

// appendTokenize appends a body of the fields that change the prompt, and no other. What the client has
// left out is left out: the route's defaults are those of a request.
func (r *reading) appendTokenize(b []byte, model string) []byte {
	b = append(b, `{"model":`...)
	b = append(b, quoted(model)...)
	for f, v := range r.values {
		if v == nil || field(f) == truncatePromptTokens {
			continue
		}
		if field(f) == prompt {
			v = r.only()
		}
		b = slices.Grow(b, len(fieldNames[f])+len(v)+len(`,"":}`))
		b = append(b, ',', '"')
		b = append(b, fieldNames[f]...)
		b = append(b, '"', ':')
		b = append(b, v...)
	}
	return append(b, '}')
}

// quoted is a name as JSON.
func quoted(name string) []byte {
	b, err := json.Marshal(name)
	if err != nil {
		panic("tokenize: a string cannot fail to render: " + err.Error())
	}
	return b
}
