package proxy

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
	"spillway/router"
	"spillway/upstream"
	"spillway/worker"
)

// counting is the route by which Anthropic's clients learn how long a prompt is. It is no
// inference: it is neither booked nor counted nor refused for load.
var counting = endpoint{label: "count_tokens", path: "/v1/messages/count_tokens", dialect: anthropic, check: checkMessages}

// countingTime bounds the answer of one worker to it.
const countingTime = 30 * time.Second

// speaks is the dialect in which errors on a path are told that no route has answered.
func (s *Server) speaks(path string) dialect {
	rest, ok := strings.CutPrefix(path, s.cfg.AnthropicPath)
	if s.cfg.EnableAnthropicAPI && ok && (rest == "" || rest[0] == '/') {
		return anthropic
	}
	return openAI
}

// countTokens has any worker that can be sent to count the tokens of a prompt.
func (s *Server) countTokens(c echo.Context) error {
	x := s.newExchange(&counting, c)
	s.inflight.Add(1) // so that a drain lets it end
	defer s.leave()
	defer x.client.served()
	defer x.memory.release()
	if !s.knows(x.req.Header) {
		x.fail(unauthorized())
		return nil
	}
	if _, err := x.prepare(); err != nil {
		x.fail(err)
		return nil
	}
	candidates, err := x.routable()
	for i, w := range candidates {
		if i > max(s.cfg.MigrationLimit, 1) || x.ctx.Err() != nil {
			break
		}
		if err = x.askCount(w, i); err == nil {
			return nil
		}
	}
	x.fail(err)
	return nil
}

// routable are the workers that may be asked, busy or not, in random order.
func (x *exchange) routable() ([]*worker.Worker, error) {
	snap := x.target.Partition.Busy.Snapshot()
	if len(snap.Registered) == 0 {
		return nil, router.ErrNoWorkers
	}
	var all []*worker.Worker
	catalog := x.s.router.Catalog()
	for _, id := range snap.Routable {
		w := catalog.Find(id)
		if w != nil && (x.target.Only == nil || slices.Contains(x.target.Only, w)) {
			all = append(all, w)
		}
	}
	if len(all) == 0 {
		return nil, router.ErrUnroutable
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all, nil
}

// askCount passes the request to one worker and its answer to the client. On an error the client
// has seen nothing.
func (x *exchange) askCount(w *worker.Worker, attempt int) error {
	x.sel = router.Selection{Worker: w}
	var err error
	if x.peer, err = x.s.peer(w, x.target.Partition.Busy); err != nil {
		return err
	}
	x.attempts++
	ctx, cancel := context.WithTimeout(x.ctx, countingTime)
	defer cancel()
	head := headPool.Get().(*[]byte)
	defer putHead(head)
	*head = x.appendHead((*head)[:0], attempt)
	resp, err := x.peer.client.Do(ctx, &upstream.Request{Method: http.MethodPost, Path: x.ep.path, Head: *head, Body: x.forward})
	if err != nil {
		return x.uncounted(err)
	}
	defer resp.Close()
	body, err := io.ReadAll(io.LimitReader(resp, maxUnary))
	switch {
	case err != nil:
		return x.uncounted(err)
	case !resp.Complete():
		return x.uncounted(fmt.Errorf("the answer exceeds %d bytes", maxUnary))
	case resp.Status >= 500:
		return &httperr.Error{
			Status: resp.Status, Cause: httperr.Internal, Message: "The worker failed to process the request",
			Detail: fmt.Errorf("worker %s answered %d: %.200q", w.Name, resp.Status, body),
		}
	case resp.Status < 200 || resp.Status >= 300 && resp.Status < 400:
		return x.uncounted(fmt.Errorf("worker answered %d", resp.Status))
	}
	x.copyHeaders(resp)
	return x.whole(resp.Status, body)
}

func (x *exchange) uncounted(err error) error {
	if left := x.ctx.Err(); left != nil {
		return left
	}
	return x.badGateway(byReset, err)
}
