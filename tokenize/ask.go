package tokenize

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// route is a way to ask.
type route uint8

const (
	toRender     route = iota // vLLM's, with the client's body
	toTokenize                // /tokenize
	toTokenizeV1              // where SGLang may have it
	numRoutes
)

var routeNames = [numRoutes]string{toRender: render, toTokenize: tokenize, toTokenizeV1: "v1_tokenize"}

// path is where a route is.
func (to route) path(chat bool) string {
	switch {
	case to == toTokenize:
		return "/tokenize"
	case to == toTokenizeV1:
		return "/v1/tokenize"
	case chat:
		return "/v1/chat/completions/render"
	}
	return "/v1/completions/render"
}

// fits tells whether a route can answer for a prompt as the worker would.
func (to route) fits(w *Worker, p *Prompt, r *reading) bool {
	switch {
	case to == toRender:
		return true
	case r.prompts > 1 || r.truncated || r.media: // it takes one text, whole, and counts an image as a token or so
		return false
	case p.Chat:
		return to == toTokenize && !w.SGLang
	}
	return true
}

// result is what became of a call.
type result uint8

const (
	told        result = iota
	unsupported        // there is no such route
	refused            // the request is not to its liking
	invalid            // the answer holds no tokens
	timedOut
	failed    // no connection, or an error of the server
	abandoned // nobody wanted it any more
	numResults
)

var resultNames = [numResults]string{
	told: "ok", unsupported: "unsupported", refused: "refused", invalid: "invalid", timedOut: "timeout", failed: "failed", abandoned: "left",
}

// ask asks one worker, by the best route that it has.
func (t *Tokenizer) ask(ctx context.Context, p *Prompt, r *reading) (Tokens, prompted) {
	now := time.Now()
	w, s, why := t.choose(p, r, now)
	if s == nil {
		return Tokens{}, why
	}
	defer s.calls.Add(-1)
	health := s.with(r.media)
	for _, to := range t.routes {
		if !to.fits(&w, p, r) || !s.route(to, p.Chat).begin(now) {
			continue
		}
		tokens, res, err := t.call(ctx, &w, to, p, r)
		t.metrics.calls[to][res].Inc()
		proven := s.route(to, p.Chat).told(res, now)
		switch res {
		case told:
			if health.well() {
				t.log.Info("worker tells tokens again", "worker", w.Name)
			}
			return tokens, asked
		case unsupported:
			continue
		case refused:
			if !proven { // it may not be the request's fault
				continue
			}
		case abandoned:
			health.untried(now)
			return Tokens{}, left
		case timedOut, failed, invalid:
			if health.ill(time.Now()) {
				t.log.Warn("worker fails to tell tokens: prompts are estimated meanwhile", "worker", w.Name, "err", err)
			}
		}
		return Tokens{}, unanswered
	}
	return Tokens{}, unanswered
}

// choose takes a place with the first worker that can be asked; s is nil, with why, if there is none.
// The place is given back by s.calls.Add(-1).
func (t *Tokenizer) choose(p *Prompt, r *reading, now time.Time) (w Worker, s *server, why prompted) {
	why = nobody
	t.workers(p, func(candidate Worker) bool {
		c := t.servers.of(candidate.ID, now)
		switch {
		case !c.has(t.routes, &candidate, p, r, now):
			why = max(why, routeless)
		case !c.enter():
			why = max(why, crowded)
		case !c.with(r.media).awake(now):
			c.calls.Add(-1)
			why = max(why, resting)
		default:
			w, s = candidate, c
			return false
		}
		return true
	})
	return w, s, why
}

// Bounds of an answer: room for a token of each byte that was sent, and for what a template adds.
const (
	answerBytes        = 1 << 20
	answerBytesPerByte = 12
	keptBuffer         = 1 << 20 // larger ones are left to the garbage collector
)

var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// call asks one route of one worker. err says more of what went wrong.
func (t *Tokenizer) call(ctx context.Context, w *Worker, to route, p *Prompt, r *reading) (Tokens, result, error) {
	model := p.Served
	if t.cfg.URL != "" {
		model = p.Model
	}
	var body []byte // of its own: what sends it may go on for a while after the answer
	if to == toRender {
		body = r.renderBody(p.Body, model)
	} else {
		body = r.tokenizeBody(model)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.Endpoint+to.path(p.Chat), bytes.NewReader(body))
	if err != nil {
		return Tokens{}, failed, err
	}
	req.Header["Content-Type"] = jsonType
	req.Header["User-Agent"] = userAgent
	req.Header["Idempotency-Key"] = nil // not sent: tells net/http that it may ask again on another connection
	if w.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+w.APIKey)
	}
	t.metrics.inflight.Inc()
	defer t.metrics.inflight.Dec()
	resp, err := t.http.Do(req)
	if err != nil {
		return Tokens{}, resultOf(err), err
	}
	defer resp.Body.Close()
	if res := statusResult(resp.StatusCode); res != told {
		io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
		return Tokens{}, res, errors.New("tokenize: answered " + resp.Status)
	}
	buf := buffers.Get().(*bytes.Buffer)
	defer func() {
		if buf.Reset(); buf.Cap() <= keptBuffer {
			buffers.Put(buf)
		}
	}()
	limit := int64(answerBytes + answerBytesPerByte*len(body))
	if n, err := buf.ReadFrom(io.LimitReader(resp.Body, limit+1)); err != nil {
		return Tokens{}, resultOf(err), err
	} else if n > limit {
		return Tokens{}, invalid, errors.New("tokenize: the answer is too long")
	}
	tokens, err := answered(to, buf.Bytes(), r)
	if err != nil {
		return Tokens{}, invalid, err
	}
	return tokens, told, nil
}

var (
	jsonType  = []string{"application/json"}
	userAgent = []string{"spillway"}
)

// statusResult is what a status means.
func statusResult(status int) result {
	switch {
	case status >= 200 && status <= 299:
		return told
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
		return unsupported
	case status == http.StatusRequestTimeout, status == http.StatusTooManyRequests, status >= 500:
		return failed
	}
	return refused
}

func resultOf(err error) result {
	var timeout net.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return timedOut
	case errors.Is(err, context.Canceled):
		return abandoned
	}
	return failed
}

// newClient has connections of its own, so that no request for tokens waits for an answer to a
// client, nor the other way round.
func newClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: mediaTimeout}).DialContext,
			MaxIdleConnsPerHost: maxCalls,
			// vLLM's server closes idle connections after 5 s; this side goes first.
			IdleConnTimeout:        4 * time.Second,
			MaxResponseHeaderBytes: 1 << 20,
			DisableCompression:     true,     // numbers, from nearby
			ReadBufferSize:         64 << 10, // IDs take three times the room of the text, and more
			WriteBufferSize:        16 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
