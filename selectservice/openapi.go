package selectservice

import (
	_ "embed"
	"net/http"
	"strings"

	"spillway/httperr"
	"spillway/jsonhttp"
)

//go:embed openapi.json
var openAPIText string

// openAPI serves the description of the routes, in the words of the contract that is served.
func (s *Server) openAPI(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	text := openAPIText
	if s.grouped {
		text = strings.NewReplacer(
			"\n    \"reservation_id\": {\"type\": [\"string\", \"null\"], \"description\": \"Of /select_and_reserve; made up if absent.\"},", "",
			", \"reservation_id\": {\"type\": \"string\"},", ",", // of a selection, which has an ID of its own
			"tenant_id", "routing_group", "reservation_id", "selection_id",
		).Replace(text)
	}
	jsonhttp.Send(w, http.StatusOK, []byte(text))
	return nil
}
