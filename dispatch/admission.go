package dispatch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

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

// grant is what gates have given a message. It belongs to one goroutine at a time, but for keep.
type grant struct {
	mu      sync.Mutex // guards taken
	taken   []taken
	labels  map[string]string // what gates have found out, over the message's own
	dropped result
	said    verdict   // what the answer meant
	success bool      // it was one
	sentAt  time.Time // when the request was, of the answer
	chosen  bool      // the message is no longer among those that may be chosen; of the round's goroutine
}

// taken is something that is to be given back.
type taken struct {
	release func(context.Context)
	refresh func(context.Context) // called with each heartbeat, or nil
}

func (g *grant) take(t taken) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.taken = append(g.taken, t)
}

// holds tells whether something is to be given back.
func (g *grant) holds() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.taken) > 0
}

// keep has what was taken not expire.
func (g *grant) keep(ctx context.Context) {
	g.mu.Lock()
	all := slices.Clone(g.taken)
	g.mu.Unlock()
	for _, t := range all {
		if t.refresh != nil {
			t.refresh(ctx)
		}
	}
}

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
	g.mu.Lock()
	back := slices.Clone(g.taken[to:])
	g.taken = g.taken[:to]
	g.mu.Unlock()
	for _, t := range slices.Backward(back) {
		t.release(ctx)
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
	g.take(taken{release: func(context.Context) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.taken--
	}})
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
	g.take(taken{release: func(context.Context) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.taken--
		switch {
		case g.said == refused:
			a.limit.Refused(g.sentAt, time.Now())
		case g.success:
			a.limit.Succeeded()
		}
	}})
	return proceed, nil
}

// redisQuota bounds what each value of an attribute may have, over all processes that share the key.
type redisQuota struct {
	redis       redis.UniversalClient
	attribute   string
	concurrency bool // else a rate
	limit       int
	window      time.Duration
	prefix      string
	classify    bool
}

var (
	acquireScript = redis.NewScript(`
local n = tonumber(redis.call('GET', KEYS[1]) or '0')
if n >= tonumber(ARGV[1]) then return 0 end
redis.call('INCR', KEYS[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1`)
	giveBackScript = redis.NewScript(`
local n = tonumber(redis.call('GET', KEYS[1]) or '0')
if n > 0 then n = redis.call('DECR', KEYS[1]) end
if n > 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return n`)
	// ARGV: start of the window and now in nanoseconds, limit, member, TTL.
	rateScript = redis.NewScript(`
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1`)
)

func (q *redisQuota) apply(ctx context.Context, m *message, g *grant) (answer, error) {
	value, ok := m.metadata[q.attribute]
	if !ok {
		return proceed, nil
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	key := []string{q.prefix + q.attribute + ":" + value}
	var got int
	var err error
	if q.concurrency {
		ttl := orSeconds(q.window, 300)
		if got, err = acquireScript.Run(ctx, q.redis, key, q.limit, ttl).Int(); err == nil && got == 1 {
			g.take(taken{
				release: func(ctx context.Context) { _ = giveBackScript.Run(ctx, q.redis, key, ttl).Err() }, // else it expires
				refresh: func(ctx context.Context) { _ = q.redis.Expire(ctx, key[0], time.Duration(ttl)*time.Second).Err() },
			})
		}
	} else {
		now := time.Now().UnixNano()
		member := strconv.FormatInt(now, 10) + "-" + strconv.FormatUint(rand.Uint64(), 36)
		got, err = rateScript.Run(ctx, q.redis, key, now-q.window.Nanoseconds(), now, q.limit, member, orSeconds(2*q.window, 3600)).Int()
	}
	if err != nil {
		return refuse, fmt.Errorf("quota: %w", err)
	}
	if q.classify {
		class := "overflow"
		if got == 1 {
			class = "reserved"
		}
		if g.labels == nil {
			g.labels = map[string]string{}
		}
		g.labels["classification"] = class
		return proceed, nil
	}
	if got == 1 {
		return proceed, nil
	}
	return refuse, nil
}

// orSeconds is a duration in whole seconds, def for none.
func orSeconds(d time.Duration, def int64) int64 {
	if s := int64(d / time.Second); s > 0 {
		return s
	}
	return def
}
