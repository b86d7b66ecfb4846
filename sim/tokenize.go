package sim

import (
	"net/http"
	"time"
)

// tokenRoutes are those that tell tokens.
func (w *worker) tokenRoutes() map[string]handler {
	all := map[string]handler{"POST /tokenize": w.tokenize}
	if w.server.cfg.RenderRoutes {
		all["POST /v1/chat/completions/render"] = w.renderChat
		all["POST /v1/completions/render"] = w.renderCompletions
	}
	return all
}

// tokenize serves POST /tokenize: the tokens that a completions request with the same prompt,
// or a chat request with the same messages, would have. The tokenizer has no special tokens
// that add_special_tokens could add.
func (w *worker) tokenize(rw http.ResponseWriter, r *http.Request) error {
	var req struct {
		conversation
		Model  string  `json:"model"`
		Prompt *string `json:"prompt"`
	}
	if err := readBody(rw, r, &req); err != nil {
		return err
	}
	if err := w.checkModel(req.Model); err != nil {
		return err
	}
	ids := []uint32{}
	if req.Prompt != nil {
		ids = appendText(ids, *req.Prompt)
	} else {
		var err error
		if ids, err = req.tokens(); err != nil {
			return err
		}
	}
	ids = w.lie(ids)
	return writeJSON(rw, http.StatusOK, struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{len(ids), w.server.cfg.MaxModelLen, ids, nil})
}

// rendered is a prompt as the engine gets it. Images have tokens of their own here, so there are no
// features to tell.
type rendered struct {
	TokenIDs []uint32 `json:"token_ids"`
	Features any      `json:"features"`
}

// renderChat serves POST /v1/chat/completions/render: the tokens of the same body at
// /v1/chat/completions.
func (w *worker) renderChat(rw http.ResponseWriter, r *http.Request) error {
	_, ids, err := w.readChat(rw, r)
	if err != nil {
		return err
	}
	return writeJSON(rw, http.StatusOK, rendered{TokenIDs: w.lie(ids)})
}

// renderCompletions serves POST /v1/completions/render.
func (w *worker) renderCompletions(rw http.ResponseWriter, r *http.Request) error {
	_, prompts, err := w.readCompletion(rw, r)
	if err != nil {
		return err
	}
	all := make([]rendered, len(prompts))
	for i, ids := range prompts {
		all[i].TokenIDs = w.lie(ids)
	}
	return writeJSON(rw, http.StatusOK, all)
}

// lie puts tokens before those of a prompt that it does not have, if a fault says so.
func (w *worker) lie(ids []uint32) []uint32 {
	f := w.faults.strike(tokenizerLie, time.Now())
	if f == nil {
		return ids
	}
	more := make([]uint32, or(f.spec.ExtraTokens, 1), len(ids)+or(f.spec.ExtraTokens, 1))
	for i := range more {
		more[i] = tokenID("a lie") + uint32(i)
	}
	return append(more, ids...)
}
