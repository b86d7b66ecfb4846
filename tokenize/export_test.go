package tokenize

import "net/http"

// Through has t call by rt, so that time in a test can be virtual.
func (t *Tokenizer) Through(rt http.RoundTripper) { t.http.Transport = rt }

// Servers is how many servers are remembered.
func (t *Tokenizer) Servers() int {
	t.servers.mu.Lock()
	defer t.servers.mu.Unlock()
	return len(t.servers.known)
}
