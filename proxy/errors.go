package proxy

import (
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
)

// flatBody is the body of every error but those of /busy_threshold, /workers and Anthropic's API; the order of its keys is part
// of the contract.
type flatBody struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Code    int    `json:"code"`
	Details any    `json:"details,omitempty"`
}

// measured is the body of an answer with its Content-Length.
type measured struct {
	body   []byte
	length []string
}

func measure(body []byte) measured { return measured{body, []string{strconv.Itoa(len(body))}} }

// body renders e. The status stands in the body too.
func (s *Server) body(e *httperr.Error, d dialect) measured {
	if e.Reason == httperr.Overloaded || e.Reason == httperr.WorkerOverloaded {
		return s.overloadBody[d] // rendered once: refusing must be cheap
	}
	return measure(d.error(s.cfg.ErrorEnvelope, e))
}

// reasonHeaders are the values of X-Spillway-Reason and X-Llm-D-Request-Dropped-Reason, made once.
var reasonHeaders = func() map[httperr.Reason][2][]string {
	m := map[httperr.Reason][2][]string{}
	for _, r := range httperr.Reasons {
		m[r] = [2][]string{{string(r)}, {r.Dropped()}}
	}
	return m
}()

// handleError is the echo.HTTPErrorHandler of the server: every error a handler or echo itself
// returns becomes an answer here, unless one is under way.
func (s *Server) handleError(err error, c echo.Context) {
	if c.Response().Committed {
		return
	}
	e := httperr.From(err, "", s.overload)
	switch {
	case e.Status == http.StatusNotFound && e.Detail == nil && isEcho(err):
		e = httperr.New(404, "No route for "+c.Request().Method+" "+cut(c.Request().URL.Path))
	case e.Status == http.StatusMethodNotAllowed:
		e = httperr.New(405, "Method "+c.Request().Method+" is not allowed on "+cut(c.Request().URL.Path))
	case e.Cause == httperr.Internal:
		s.log.Error("request failed", "method", c.Request().Method, "path", c.Request().URL.Path, "err", err)
	}
	s.answer(c.Response(), e, s.speaks(c.Request().URL.Path))
}

// cut bounds what a client's own words may add to an answer.
func cut(path string) string {
	const most = 256
	if len(path) <= most {
		return path
	}
	return strings.ToValidUTF8(path[:most], "") + "..."
}

func isEcho(err error) bool {
	_, ok := err.(*echo.HTTPError)
	return ok
}

// answer writes e as the whole answer.
func (s *Server) answer(w http.ResponseWriter, e *httperr.Error, d dialect) {
	h := w.Header()
	h["Content-Type"] = jsonType
	if e.Status == http.StatusUnauthorized {
		h["Www-Authenticate"] = bearerScheme
	}
	if e.Reason != "" {
		values := reasonHeaders[e.Reason]
		h["X-Spillway-Reason"], h["X-Llm-D-Request-Dropped-Reason"] = values[0], values[1]
		switch {
		case e.Reason.Rejected():
			s.retryAfter(h, e.RetryAfter)
			if s.cfg.SuppressSDKRetry {
				h["X-Should-Retry"] = []string{"false"}
			}
		case e.Reason == httperr.BodyMemory:
			s.retryAfter(h, e.RetryAfter)
		case e.Reason == httperr.NoHealthyWorkers:
			h["Retry-After"] = []string{seconds(max(e.RetryAfter, time.Second))}
		case e.Reason == httperr.Draining:
			h["Connection"] = []string{"close"}
		}
	}
	b := s.body(e, d)
	h["Content-Length"] = b.length
	w.WriteHeader(e.Status)
	if _, err := w.Write(b.body); err != nil {
		s.log.Debug("client left before its answer", slog.Any("err", err))
	}
}

var jsonType = []string{"application/json"}

// seconds renders a duration for Retry-After, rounded up.
func seconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}

// retryAfter says when to come back: what a worker asked for or auto came to, else what is
// configured.
func (s *Server) retryAfter(h http.Header, asked time.Duration) {
	switch {
	case asked > 0:
		h["Retry-After"] = []string{seconds(asked)}
		if s.autoRetry {
			h["Retry-After-Ms"] = []string{strconv.FormatInt(int64((asked+time.Millisecond-1)/time.Millisecond), 10)} // up, as the seconds are
		}
	case s.cfg.RetryAfter == "0":
	case s.autoRetry: // it is not known when there will be room
		h["Retry-After"] = []string{seconds(minWait * time.Second)}
	default:
		h["Retry-After"] = s.retryValue
	}
}
