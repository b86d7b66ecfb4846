package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// errCut ends a request whose client has left, or that the end of the worker cuts. There is
// nobody to tell.
var errCut = errors.New("sim: the request was cut")

// apiError is an answer like vLLM's to a request that it cannot serve.
type apiError struct {
	status  int
	kind    string // vLLM's error type
	message string
}

func (e *apiError) Error() string { return "sim: " + e.message }

func badRequest(format string, args ...any) error {
	return &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...)}
}

// writeError answers with err, or breaks the connection if it is errCut.
func writeError(rw http.ResponseWriter, err error) {
	if errors.Is(err, errCut) {
		panic(http.ErrAbortHandler)
	}
	e := &apiError{http.StatusInternalServerError, "InternalServerError", err.Error()}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		e = &apiError{http.StatusRequestEntityTooLarge, "BadRequestError",
			fmt.Sprintf("The request body is larger than %d bytes.", tooLarge.Limit)}
	}
	errors.As(err, &e)
	type body struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    int     `json:"code"`
	}
	_ = writeJSON(rw, e.status, map[string]body{"error": {Message: e.message, Type: e.kind, Code: e.status}})
}

// writeJSON answers with v and reports whether the client took it.
func writeJSON(rw http.ResponseWriter, status int, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("sim: encode an answer: %w", err)
	}
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(status)
	if _, err := rw.Write(data); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	return nil
}
