package sim

import "net/http"

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
	return writeJSON(rw, http.StatusOK, struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{len(ids), w.server.cfg.MaxModelLen, ids, nil})
}
