package dispatch

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"spillway/dispatch/budget"
)

// answer is what a gate says of one message.
type answer uint8

const (
	proceed answer = iota
	refuse         // not now; others may go
	wait           // not now, and it may not have to go back
	drop           // never: it gets grant.dropped as its result
)

// admission is the part of a gate that looks at messages. What it takes for one it adds to g, even if it
// is another one's turn to say no. An error is as good as closed.
type admission interface {
	apply(ctx context.Context, m *message, g *grant) (answer, error)
}

// grant is what gates have given a message. It belongs to one goroutine at a time.
type grant struct {
	taken   []func(context.Context) // that give it back
	labels  map[string]string       // what gates have found out, over the message's own
	dropped result
	said    verdict   // what the answer meant
	success bool      // it was one
	sentAt  time.Time // when the request was, of the answer
	chosen  bool      // the message is no longer among those that may be chosen; of the round's goroutine
}

// take notes what is to be given back, and how.
func (g *grant) take(release func(context.Context)) { g.taken = append(g.taken, release) }

// holds tells whether something is to be given back.
func (g *grant) holds() bool { return len(g.taken) > 0 }

// label is one of the message, as gates have changed it.
func (g *grant) label(m *message, name string) string {
	if v, ok := g.labels[name]; ok {
		return v
	}
	return m.labels[name]
}

// release gives everything back, in the reverse order, once.
func (g *grant) release(ctx context.Context) { g.rollback(ctx, 0) }

func (g *grant) rollback(ctx context.Context, to int) {
	back := g.taken[to:]
	g.taken = g.taken[:to]
	for _, release := range slices.Backward(back) {
		release(ctx)
	}
}

// chain asks one gate after the other until one does not say proceed; then all is given back.
type chain []admission

func (c chain) apply(ctx context.Context, m *message, g *grant) (answer, error) {
	before := len(g.taken)
	for _, a := range c {
		if said, err := a.apply(ctx, m, g); err != nil || said != proceed {
			g.rollback(ctx, before)
			return said, err
		}
	}
	return proceed, nil
}

// room refuses messages while sources leave none.
type room struct{ budget *budget.Group }

func (r room) apply(context.Context, *message, *grant) (answer, error) {
	if r.budget.Decide(time.Now()).State != budget.Open {
		return refuse, nil
	}
	return proceed, nil
}

// waitOnRefuse has messages wait that would be refused.
type waitOnRefuse struct{ inner admission }

func (w waitOnRefuse) apply(ctx context.Context, m *message, g *grant) (answer, error) {
	said, err := w.inner.apply(ctx, m, g)
	if said == refuse {
		said = wait
	}
	return said, err
}

// tierAdmission decides by tier what a refusal means.
type tierAdmission struct {
	inner admission
	label string
}

func (t tierAdmission) apply(ctx context.Context, m *message, g *grant) (answer, error) {
	said, err := t.inner.apply(ctx, m, g)
	if err != nil || said != refuse {
		return said, err
	}
	class := g.label(m, "classification")
	switch {
	case class == "reserved":
		return wait, nil
	case class == "overflow" && g.label(m, t.label) == "interactive":
		g.dropped = result{StatusCode: http.StatusTooManyRequests, Payload: `{"error": "Too Many Requests", "code": 429}`, ErrorCode: codeDropped, ErrorMessage: "Pool gating dropped request"}
		return drop, nil
	}
	return refuse, nil
}

// localMax lets so many messages through at once.
type localMax struct {
	limit int

	mu    sync.Mutex // guards taken
	taken int
}

func (l *localMax) apply(_ context.Context, _ *message, g *grant) (answer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken >= l.limit {
		return refuse, nil
	}
	l.taken++
	g.take(func(context.Context) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.taken--
	})
	return proceed, nil
}

// adaptive lets through as many at once as answers have shown to be right.
type adaptive struct {
	mu    sync.Mutex // guards the fields below
	limit budget.AIMD
	taken int
}

func (a *adaptive) apply(_ context.Context, _ *message, g *grant) (answer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.taken >= a.limit.Limit() {
		return refuse, nil
	}
	a.taken++
	g.take(func(context.Context) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.taken--
		switch {
		case g.said == refused:
			a.limit.Refused(g.sentAt, time.Now())
		case g.success:
			a.limit.Succeeded()
		}
	})
	return proceed, nil
}
