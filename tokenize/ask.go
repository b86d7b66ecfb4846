package tokenize

import (
	"context"
	"errors"
	"net/http"
	"strconv"
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
		tokens, res, err := t.call(ctx, s, &w, to, p, r)
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

// call asks one route of one worker. err says more of what went wrong.
func (t *Tokenizer) call(ctx context.Context, s *server, w *Worker, to route, p *Prompt, r *reading) (Tokens, result, error) {
	model := p.Served
	if t.cfg.URL != "" {
		model = p.Model
	}
	l := letters.Get().(*letter)
	defer l.release()
	if to == toRender {
		l.body = r.appendRender(l.body[:0], p.Body, model)
	} else {
		l.body = r.appendTokenize(l.body[:0], model)
	}
	t.metrics.inflight.Inc()
	defer t.metrics.inflight.Dec()
	status, err := t.post(s, ctx, w, to.path(p.Chat), l)
	if err != nil {
		return Tokens{}, resultOf(ctx, err), err
	}
	if res := statusResult(status); res != told {
		return Tokens{}, res, errors.New("tokenize: answered " + strconv.Itoa(status))
	}
	if len(l.answer) > l.limit() {
		return Tokens{}, invalid, errors.New("tokenize: the answer is too long")
	}
	tokens, err := answered(to, l.answer, r)
	if err != nil {
		return Tokens{}, invalid, err
	}
	return tokens, told, nil
}

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

func resultOf(ctx context.Context, err error) result {
	until, limited := ctx.Deadline()
	switch {
	case errors.Is(err, context.DeadlineExceeded), limited && !time.Now().Before(until): // whatever noticed it first
		return timedOut
	case errors.Is(err, context.Canceled):
		return abandoned
	}
	return failed
}
