package proxy

import "spillway/httperr"

// endpoint is one inference route.
type endpoint struct {
	index   int    // in endpoints
	label   string // of metrics
	path    string // on the worker, and on this server unless configured otherwise
	streams bool   // may be asked to stream
	decodes bool   // generates tokens, and so holds KV blocks
	check   func(*scanned) *httperr.Error
}

// numEndpoints is how many inference routes there are.
const numEndpoints = 3

var endpoints = [numEndpoints]endpoint{
	{0, "chat_completions", "/v1/chat/completions", true, true, checkChat},
	{1, "completions", "/v1/completions", true, true, checkCompletions},
	{2, "embeddings", "/v1/embeddings", false, false, checkEmbeddings},
}
