package proxy

import (
	_ "embed"
	"net/http"
	"strings"

	"github.com/labstack/echo/v4"
)

//go:embed docs.html
var docsPage string

// summaries describe the routes in the OpenAPI document; a route without one is still listed.
var summaries = map[string]string{
	"/health": "Readiness, as Dynamo's front end has it", "/live": "Liveness", "/ready": "Readiness for load balancers",
	"/internal/capacity":      "How full a pool of workers is; waits for news with after=SEQ",
	"/internal/dispatch/{id}": "The dispatcher of batch requests: status, submit, results, cancel, dead",
	"/metrics":                "Prometheus metrics", "/busy_threshold": "Thresholds above which a worker is busy",
	"/v1/chat/completions": "Chat completion, streamed or not", "/v1/completions": "Completion, streamed or not",
	"/v1/responses": "Response, streamed or not", "/v1/messages": "Message by Anthropic's API, streamed or not",
	"/v1/messages/count_tokens": "Length of a prompt by Anthropic's API",
	"/v1/embeddings":            "Embeddings", "/v1/models": "Models that can be asked for",
	"/v1/models/{id}": "One model; {id}/ready tells how its workers stand",
	"/openapi.json":   "This document", "/docs": "This document as a page",
	"/workers": "Workers: those that are known; POST adds or replaces one", "/workers/{id}": "One worker; PATCH changes it, DELETE takes it out",
	"/debug/pprof/{id}": "One of Go's profiles, or the list of them", "/debug/pprof/cmdline": "The command line",
	"/debug/pprof/profile": "A CPU profile", "/debug/pprof/symbol": "Names of program counters", "/debug/pprof/trace": "An execution trace",
}

// openAPI lists every route of a listener.
func openAPI(c echo.Context, e *echo.Echo) error {
	paths := map[string]map[string]any{}
	for _, r := range e.Routes() {
		path := strings.NewReplacer("*", "{id}", ":id", "{id}").Replace(r.Path)
		if paths[path] == nil {
			paths[path] = map[string]any{}
		}
		op := map[string]any{
			"summary":   summaries[path],
			"responses": map[string]any{"default": map[string]string{"description": "JSON, an event stream or text, as the route has it"}},
		}
		if strings.Contains(path, "{id}") {
			op["parameters"] = []any{map[string]any{
				"name": "id", "in": "path", "required": true, "schema": map[string]string{"type": "string"},
			}}
		}
		if r.Method == http.MethodPost || r.Method == http.MethodPatch {
			op["requestBody"] = map[string]any{"content": map[string]any{
				"application/json": map[string]any{"schema": map[string]string{"type": "object"}},
			}}
		}
		paths[path][strings.ToLower(r.Method)] = op
	}
	return c.JSON(http.StatusOK, map[string]any{
		"openapi": "3.0.3",
		"info":    map[string]string{"title": "Spillway front end", "version": "1"},
		"paths":   paths,
	})
}

// docs is a page that renders the document; it loads nothing from elsewhere.
func (s *Server) docs(c echo.Context) error { return c.HTML(http.StatusOK, docsPage) }
