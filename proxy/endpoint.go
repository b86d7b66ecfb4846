package proxy

import "spillway/httperr"

// endpoint is one inference route.
type endpoint struct {
	index   int    // in endpoints
	label   string // of metrics
	path    string // on the worker, and on this server unless configured otherwise
	streams bool   // may be asked to stream
	decodes bool   // generates tokens, and so holds KV blocks
	dialect dialect
	check   func(*scanned) *httperr.Error
}

// Indexes in endpoints.
const chatCompletions = 0

// numEndpoints is how many inference routes there are.
const numEndpoints = 5

var endpoints = [numEndpoints]endpoint{
	{0, "chat_completions", "/v1/chat/completions", true, true, openAI, checkChat},
	{1, "completions", "/v1/completions", true, true, openAI, checkCompletions},
	{2, "embeddings", "/v1/embeddings", false, false, openAI, checkEmbeddings},
	{3, "responses", "/v1/responses", true, true, responses, checkResponses},
	{4, "anthropic_messages", "/v1/messages", true, true, anthropic, checkMessages},
}
