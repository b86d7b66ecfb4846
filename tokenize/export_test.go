package tokenize

import (
	"bytes"
	"context"
	"io"
	"net/http"
)

// Through has t call by rt, so that time in a test can be virtual.
func (t *Tokenizer) Through(rt http.RoundTripper) {
	t.post = func(_ *server, ctx context.Context, w *Worker, path string, l *letter) (status int, err error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.Endpoint+path, bytes.NewReader(l.body))
		if err != nil {
			return 0, err
		}
		if w.APIKey != "" {
			req.Header.Set("Authorization", "Bearer "+w.APIKey)
		}
		resp, err := rt.RoundTrip(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		l.answer, err = io.ReadAll(resp.Body)
		return resp.StatusCode, err
	}
}

// Servers is how many servers are remembered.
func (t *Tokenizer) Servers() int {
	t.servers.mu.Lock()
	defer t.servers.mu.Unlock()
	return len(t.servers.known)
}
