package dispatch

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// redisQuota bounds what each value of an attribute may have, over all processes that share the key.
type redisQuota struct {
	redis       redis.UniversalClient
	attribute   string
	concurrency bool // else a rate
	limit       int
	window      time.Duration
	prefix      string
	classify    bool

	mu   sync.Mutex     // guards held
	held map[string]int // by key: what this process has taken and not given back, of concurrency
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
	key := q.prefix + q.attribute + ":" + value
	var got int
	var err error
	if q.concurrency {
		if got, err = acquireScript.Run(ctx, q.redis, []string{key}, q.limit, int64(q.ttl()/time.Second)).Int(); err == nil && got == 1 {
			q.took(key, 1)
			g.take(func(ctx context.Context) {
				q.took(key, -1)
				_ = giveBackScript.Run(ctx, q.redis, []string{key}, int64(q.ttl()/time.Second)).Err() // else it expires
			})
		}
	} else {
		now := time.Now().UnixNano()
		member := strconv.FormatInt(now, 10) + "-" + strconv.FormatUint(rand.Uint64(), 36)
		got, err = rateScript.Run(ctx, q.redis, []string{key}, now-q.window.Nanoseconds(), now, q.limit, member, orSeconds(2*q.window, 3600)).Int()
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

// ttl is when a count expires that nobody changes, in whole seconds.
func (q *redisQuota) ttl() time.Duration {
	return time.Duration(orSeconds(q.window, 300)) * time.Second
}

// took counts what this process holds under a key.
func (q *redisQuota) took(key string, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.held[key] += n; q.held[key] == 0 {
		delete(q.held, key)
	}
}

// renewals has no count expire of which this process holds something, until ctx ends. The loop is the gate's
// own: a Redis of quotas that hangs must not hold up what keeps leases, or other gates.
func (q *redisQuota) renewals(ctx context.Context) {
	beat := time.NewTicker(min(q.ttl()/3, maxBeat))
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
			q.renew(ctx)
		}
	}
}

func (q *redisQuota) renew(ctx context.Context) {
	q.mu.Lock()
	all := slices.Collect(maps.Keys(q.held))
	q.mu.Unlock()
	if len(all) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	pipe := q.redis.Pipeline()
	for _, key := range all {
		pipe.Expire(ctx, key, q.ttl())
	}
	_, _ = pipe.Exec(ctx) // else at the next beat; apply tells that the gate fails
}

// orSeconds is a duration in whole seconds, def for none.
func orSeconds(d time.Duration, def int64) int64 {
	if s := int64(d / time.Second); s > 0 {
		return s
	}
	return def
}
