package dispatch

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// keys are those of one queue. All but the queue itself are private to dispatchers, and hash to the
// same slot of a cluster.
type keys struct {
	queue, leases, body, score, owner, deliveries, delayed, dead string
}

func keysOf(queue string) keys {
	p := "{" + queue + "}"
	if open := strings.IndexByte(queue, '{'); open >= 0 && strings.IndexByte(queue[open+1:], '}') > 0 {
		p = queue // it has a tag
	}
	return keys{queue, p + ":leases", p + ":body", p + ":score", p + ":owner", p + ":deliv", p + ":delayed", p + ":dead"}
}

// spread tells that the keys may be in different slots of a cluster: the queue's name has a brace that
// is no tag, and no other name has its slot.
func (k keys) spread() bool {
	return !strings.HasPrefix(k.leases, k.queue) && strings.Contains(k.queue, "}")
}

func (k keys) list(more ...string) []string {
	return append([]string{k.queue, k.leases, k.body, k.score, k.owner, k.deliveries, k.delayed, k.dead}, more...)
}

func activeKey(id string) string { return "request-active:" + id }
func cancelKey(id string) string { return "request-cancel:" + id }

// store keeps messages in Redis. Each of its operations is one script, so that a process that dies
// leaves the state before it or the one after. Times are those of the server.
type store struct {
	redis   redis.UniversalClient
	cluster bool // keys of different queues cannot be used together
	deadMax int64
}

// lease is the right to work on a message.
type lease struct {
	m        *message
	queue    *Queue
	token    string      // of this claim
	reserved bool        // its worker counted as taken before the claim
	delivery int64       // how often it has been claimed without an outcome, this time included
	pause    bool        // it is given back with a hold; of the worker's goroutine
	ended    bool        // the budget has forgotten it
	ending   atomic.Bool // what became of the message is being written; that finds out whether the lease is lost
	grant    *grant
}

// errFenced tells that somebody else has the message by now.
var errFenced = errors.New("the lease was lost")

func newToken() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// peek reads the first members of a queue.
func (s *store) peek(ctx context.Context, q *Queue, n int64) ([]redis.Z, error) {
	return s.redis.ZRangeWithScores(ctx, q.keys.queue, 0, n-1).Result()
}

// call is one run of a script.
type call struct {
	what   string // for errors
	script *redis.Script
	keys   []string
	args   []any
	cmd    *redis.Cmd // what came of it
}

// size is about how many bytes it has.
func (c *call) size() int {
	n := 256
	for _, a := range c.args {
		switch a := a.(type) {
		case []byte:
			n += len(a)
		case string:
			n += len(a)
		}
	}
	return n
}

// owned is the outcome of a call that returns 0 if somebody else has the message: then errFenced.
func (c *call) owned() error {
	n, err := c.cmd.Int()
	if err != nil {
		return fmt.Errorf("%s: %w", c.what, err)
	}
	return fenced(n == 0)
}

// run makes one call.
func (s *store) run(ctx context.Context, c *call) *call {
	c.cmd = c.script.Run(ctx, s.redis, c.keys, c.args...)
	return c
}

// together makes calls one after the other in one round trip, so that a server that writes what it is
// told to a disk does that once for all. Each succeeds or fails by itself. A cluster keeps no order
// among calls that are sent together, so there each waits for the one before.
func (s *store) together(ctx context.Context, all []*call) {
	if s.cluster {
		for _, c := range all {
			s.run(ctx, c)
		}
		return
	}
	for again := false; len(all) > 0; again = true {
		pipe := s.redis.Pipeline()
		for _, c := range all {
			c.cmd = c.script.EvalSha(ctx, pipe, c.keys, c.args...)
		}
		_, _ = pipe.Exec(ctx) // each call has its own error
		if again {
			return
		}
		var unknown []*call // a server that was started anew has forgotten its scripts
		for _, c := range all {
			if redis.HasErrorPrefix(c.cmd.Err(), "NOSCRIPT") {
				unknown = append(unknown, c)
			}
		}
		if all = unknown; len(all) > 0 {
			s.teach(ctx)
		}
	}
}

// teach loads the scripts that are called together: all of them, since if one alone were known its call
// would be made before those that should come first.
func (s *store) teach(ctx context.Context) {
	for _, one := range []*redis.Script{claimScript, publishScript, settleScript, delayScript, releaseScript} {
		_ = one.Load(ctx, s.redis).Err() // what is still unknown is told by its call; a pipeline would not do
	}
}

// claim is a call that takes messages out of a queue.
type claim struct {
	*call
	leases []*lease // that are asked for
}

// claim asks for messages of one queue, of which others may have taken some meanwhile.
func (s *store) claim(leases []*lease, ttl time.Duration) claim {
	q := leases[0].queue
	args, k := append(make([]any, 0, 1+4*len(leases)), ttl.Milliseconds()), q.keys.list()
	for _, l := range leases {
		args = append(args, l.m.gid, l.m.raw, l.token, l.m.token)
		if !s.cluster { // there the markers may be anywhere
			k = append(k, cancelKey(l.m.id))
		}
	}
	return claim{&call{what: "claim", script: claimScript, keys: k, args: args}, leases}
}

// got is what the claim was given, which messages were cancelled instead, and which are not to be had.
func (c claim) got() (claimed, cancelled, lost []*lease, err error) {
	counts, err := c.cmd.Int64Slice()
	if err == nil && len(counts) != len(c.leases) {
		err = fmt.Errorf("%d outcomes of %d", len(counts), len(c.leases))
	}
	if err != nil {
		return nil, nil, c.leases, fmt.Errorf("claim: %w", err)
	}
	claimed = c.leases[:0]
	for i, l := range c.leases {
		switch n := counts[i]; {
		case n > 0:
			l.delivery = n
			claimed = append(claimed, l)
		case n < 0:
			cancelled = append(cancelled, l)
		default:
			lost = append(lost, l)
		}
	}
	return claimed, cancelled, lost, nil
}

// settling publishes the results of leased messages of one queue, each by itself.
type settling struct {
	queue *Queue
	all   []*write
	made  *call
}

func (s *settling) add(w *write) { s.all = append(s.all, w) }

func (s *settling) call() *call {
	k, args := s.queue.keys.list(), make([]any, 0, 4*len(s.all))
	for _, w := range s.all {
		e := w.settlement
		k = append(k, e.list, activeKey(e.m.id), cancelKey(e.m.id))
		args = append(args, e.m.gid, e.token, e.result, e.m.token)
	}
	s.made = &call{what: "settle", script: publishScript, keys: k, args: args}
	return s.made
}

// tell has each write know what came of it.
func (s *settling) tell() {
	all, err := s.made.cmd.Slice()
	if err == nil && len(all) != len(s.all) {
		err = fmt.Errorf("%d outcomes of %d", len(all), len(s.all))
	}
	for i, w := range s.all {
		switch {
		case err != nil:
			w.err = fmt.Errorf("settle: %w", err)
		case all[i] == int64(1):
			w.err = nil
		case all[i] == int64(0):
			w.err = errFenced
		default:
			w.err = fmt.Errorf("settle: push the result to %s: %v", w.settlement.list, all[i])
		}
	}
}

// renew extends leases of one queue and returns those that are lost.
func (s *store) renew(ctx context.Context, q *Queue, held []*lease, ttl time.Duration) (lost []*lease, err error) {
	args := []any{ttl.Milliseconds()}
	for _, l := range held {
		args = append(args, l.m.gid, l.token)
	}
	got, err := renewScript.Run(ctx, s.redis, q.keys.list(), args...).Int64Slice()
	if err != nil {
		return nil, fmt.Errorf("renew: %w", err)
	}
	for i, ok := range got {
		if ok == 0 {
			lost = append(lost, held[i])
		}
	}
	return lost, nil
}

// deadLetter is why a message is given up, and what was known of it.
type deadLetter struct {
	reason     string
	deliveries int64
	attempts   int
	status     int
	err        string
}

// settlement ends a message: its result is published, and it is forgotten, in one step.
type settlement struct {
	queue   *Queue
	m       *message
	token   string // of the lease; "" for a message that is still in the queue
	expired bool   // the lease must have expired
	list    string // for the result
	result  []byte // nil for none
	dead    *deadLetter
}

// settle returns errFenced if somebody else has the message.
func (s *store) settle(ctx context.Context, e settlement) error {
	c := s.settling(e)
	if s.cluster { // the list and the markers may be anywhere
		c.keys = e.queue.keys.list()
		if e.result != nil {
			if lost, err := s.holds(ctx, e); err != nil || lost {
				return errors.Join(err, fenced(lost))
			}
			if err := s.redis.LPush(ctx, e.list, e.result).Err(); err != nil {
				return fmt.Errorf("push the result: %w", err)
			}
			c.args[3] = ""
		}
	}
	err := s.run(ctx, c).owned()
	if err == nil && s.cluster && e.m.token != "" {
		for _, key := range []string{activeKey(e.m.id), cancelKey(e.m.id)} {
			_ = dropMarker.Run(ctx, s.redis, []string{key}, e.m.token).Err() // it expires by itself
		}
	}
	return err
}

// settling is the call of settle.
func (s *store) settling(e settlement) *call {
	expired, reason := "", ""
	if e.expired {
		expired = "1"
	}
	raw := e.m.raw
	if e.token != "" {
		raw = nil // it is known by its lease
	}
	args := []any{e.m.gid, e.token, raw, e.result, expired, e.m.token, reason, s.deadMax}
	if d := e.dead; d != nil {
		args[6] = d.reason
		args = append(args, "raw", e.m.raw, "id", e.m.id, "queue", e.queue.Name, "deliveries", d.deliveries,
			"attempts", d.attempts, "last_status", d.status, "last_error", d.err)
	}
	return &call{what: "settle", script: settleScript, keys: e.queue.keys.list(e.list, activeKey(e.m.id), cancelKey(e.m.id)), args: args}
}

var dropMarker = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

// holds renews the lease that a settlement is about, so that the list may be pushed to.
func (s *store) holds(ctx context.Context, e settlement) (lost bool, err error) {
	if e.token == "" {
		n, err := s.redis.ZScore(ctx, e.queue.keys.queue, string(e.m.raw)).Result()
		if errors.Is(err, redis.Nil) {
			return true, nil
		}
		_ = n
		return false, err
	}
	if e.expired {
		return false, nil // settle looks again
	}
	gone, err := s.renew(ctx, e.queue, []*lease{{m: e.m, queue: e.queue, token: e.token}}, time.Minute)
	return len(gone) > 0, err
}

func fenced(is bool) error {
	if is {
		return errFenced
	}
	return nil
}

// delay puts a leased message aside for a while, unless somebody else has it.
func (s *store) delay(l *lease, d time.Duration, next []byte) *call {
	return &call{what: "delay", script: delayScript, keys: l.queue.keys.list(), args: []any{l.m.gid, l.token, d.Milliseconds(), next}}
}

// release gives a leased message back as it was, unless somebody else has it.
func (s *store) release(l *lease) *call {
	return &call{what: "release", script: releaseScript, keys: l.queue.keys.list(), args: []any{l.m.gid, l.token}}
}

// promote puts delayed messages that are due back into the queue.
func (s *store) promote(ctx context.Context, q *Queue, limit int) (int, error) {
	return promoteScript.Run(ctx, s.redis, q.keys.list(), limit).Int()
}

// delivered is a message that was claimed too often.
type delivered struct {
	m     *message
	token string
	n     int64
}

// reap puts messages with expired leases back into the queue, and returns those that were delivered
// too often.
func (s *store) reap(ctx context.Context, q *Queue, limit int, most int) (back int, often []delivered, err error) {
	got, err := reapScript.Run(ctx, s.redis, q.keys.list(), limit, most).Slice()
	if err != nil {
		return 0, nil, fmt.Errorf("reap: %w", err)
	}
	n, _ := got[0].(int64)
	for i := 1; i+3 < len(got); i += 4 {
		gid, _ := got[i].(string)
		token, _ := got[i+1].(string)
		raw, _ := got[i+2].(string)
		count, _ := got[i+3].(int64)
		m, _ := parse(raw, 0) // it goes to the dead letters whatever it is
		m.gid = gid
		often = append(often, delivered{m, token, count})
	}
	return int(n), often, nil
}

// cancelled tells which messages have been cancelled by their producers. Those without a token
// cannot be.
func (s *store) cancelled(ctx context.Context, all []*message) (map[*message]bool, error) {
	found := map[*message]bool{}
	var asked []*message
	var got []*redis.StringCmd
	pipe := s.redis.Pipeline()
	for _, m := range all {
		if m.token != "" {
			asked, got = append(asked, m), append(got, pipe.Get(ctx, cancelKey(m.id)))
		}
	}
	if len(asked) == 0 {
		return found, nil
	}
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return nil, fmt.Errorf("look for cancellations: %w", err)
	}
	for i, m := range asked {
		if got[i].Val() == m.token {
			found[m] = true
		}
	}
	return found, nil
}

// depth is what a queue holds.
type depth struct {
	pending, leased, delayed, dead int64
	head                           *message // nil if there is none
}

func (s *store) depth(ctx context.Context, q *Queue) (depth, error) {
	pipe := s.redis.Pipeline()
	pending, leased, delayed := pipe.ZCard(ctx, q.keys.queue), pipe.ZCard(ctx, q.keys.leases), pipe.ZCard(ctx, q.keys.delayed)
	dead, head := pipe.XLen(ctx, q.keys.dead), pipe.ZRangeWithScores(ctx, q.keys.queue, 0, 0)
	if _, err := pipe.Exec(ctx); err != nil {
		return depth{}, fmt.Errorf("measure %s: %w", q.Name, err)
	}
	d := depth{pending.Val(), leased.Val(), delayed.Val(), dead.Val(), nil}
	if z := head.Val(); len(z) > 0 {
		raw, _ := z[0].Member.(string)
		d.head, _ = parse(raw, z[0].Score)
	}
	return d, nil
}
