package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/upstream"
	"spillway/worker"
)

// A canary is a request for one token to a worker that has not shown for a while that it still
// generates. Health probes do not: an engine whose GPU hangs answers them.

// canaryEvery is how often workers are looked at, given how long they may be silent.
func canaryEvery(after time.Duration) time.Duration {
	return min(max(after/4, releaseEvery), time.Second)
}

// canaries sends one to every routable worker that has had no success for CanaryAfter.
func (s *Server) canaries(ctx context.Context, now time.Time, running *sync.WaitGroup) {
	catalog := s.router.Catalog()
	s.router.Partitions("", func(part *router.Partition) {
		for _, id := range part.Busy.Snapshot().Routable {
			w := catalog.Find(id)
			if w == nil {
				continue
			}
			p, err := s.peer(w, part.Busy)
			if err != nil || !p.silent(now, s.cfg.CanaryAfter) {
				continue
			}
			if !p.canary.CompareAndSwap(false, true) {
				continue // the last one is still out
			}
			leave, ok := p.circuit.allow(now)
			if !ok {
				p.canary.Store(false)
				continue
			}
			running.Go(func() {
				defer p.canary.Store(false)
				v, err := s.canary(ctx, w, p, part.Busy)
				now := time.Now()
				leave.settle(v, now)
				switch {
				case v == succeeded:
					p.proved.Store(now.UnixNano())
				case err != nil:
					s.log.Warn("canary failed", "worker", w.Name, "err", err)
				}
			})
		}
	})
}

// silent tells whether the worker has neither succeeded nor been sent a canary for that long. If
// so, the next one is due only after as long again.
func (p *peer) silent(now time.Time, after time.Duration) bool {
	last := p.proved.Load()
	return now.Sub(time.Unix(0, last)) >= after && p.proved.CompareAndSwap(last, now.UnixNano())
}

// canary sends one, with the consequences of any other request. It is so small that it is not
// booked.
func (s *Server) canary(ctx context.Context, w *worker.Worker, p *peer, list *busy.List) (verdict, error) {
	asked, cancel := context.WithTimeout(ctx, s.cfg.CanaryTimeout)
	defer cancel()
	answer, err := ask(asked, w, p)
	now := time.Now()
	switch {
	case ctx.Err() != nil: // we are stopping
		return neutral, nil
	case err != nil:
		if s.cfg.InhibitedDuration > 0 {
			list.Inhibit(w.ID, now.Add(s.cfg.InhibitedDuration), now)
		}
		return failed, err
	case answer.status < 300:
		return succeeded, nil
	case answer.load:
		list.Mark(w.ID, nil, answer.after, now)
		return neutral, nil
	case !blames(answer.status):
		return neutral, nil
	}
	return failed, fmt.Errorf("worker answered %d: %.200q", answer.status, answer.body)
}

// ask has the worker generate one token.
func ask(ctx context.Context, w *worker.Worker, p *peer) (answer canaryAnswer, err error) {
	content, err := json.Marshal(map[string]any{
		"model": w.Models[0], "messages": []map[string]string{{"role": "user", "content": "Hi"}}, "max_tokens": 1,
	})
	if err != nil {
		return answer, fmt.Errorf("proxy: canary: %w", err)
	}
	head := []byte("Content-Type: application/json\r\nAccept-Encoding: identity\r\n")
	if w.APIKey != "" {
		head = upstream.AppendHeader(head, "Authorization", "Bearer "+w.APIKey)
	}
	resp, err := p.client.Do(ctx, &upstream.Request{Method: http.MethodPost, Path: "/v1/chat/completions", Head: head, Body: content})
	if err != nil {
		return answer, err
	}
	defer resp.Close()
	p.answered(resp.Status)
	for len(answer.body) < maxErrorBody && !resp.Complete() {
		part, err := resp.Next()
		answer.body = append(answer.body, part...)
		if err != nil && !resp.Complete() {
			return answer, err
		}
	}
	after, given := retryAfterOf(resp)
	answer.status, answer.after, answer.load = resp.Status, after, ofLoad(resp.Status, given, answer.body)
	return answer, nil
}

// canaryAnswer is what a worker said to a canary.
type canaryAnswer struct {
	status int
	after  time.Duration // Retry-After
	load   bool          // it has too much to do
	body   []byte
}
