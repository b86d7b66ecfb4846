package dispatch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/redis/go-redis/v9"
)

// Bare does for messages what cannot be left out, one after the other: a claim, the request and the
// settlement, with the dispatcher's scripts and nothing around them.
type Bare struct {
	Redis  redis.UniversalClient
	Client *http.Client
	URL    string // of requests
	queue  *Queue
	all    []*message
}

// Load reads what is in a queue, and returns its length.
func (b *Bare) Load(ctx context.Context, queue string) (int, error) {
	b.queue = &Queue{ID: queue, Name: queue, keys: keysOf(queue)}
	found, err := b.Redis.ZRangeWithScores(ctx, queue, 0, -1).Result()
	if err != nil {
		return 0, err
	}
	b.all = nil
	for _, z := range found {
		raw, _ := z.Member.(string)
		m, err := parse(raw, z.Score)
		if err != nil {
			return 0, err
		}
		b.all = append(b.all, m)
	}
	return len(b.all), nil
}

// Do takes message i all the way, and tells how long its steps took.
func (b *Bare) Do(ctx context.Context, i int) (claim, request, settle time.Duration, err error) {
	m, token, began := b.all[i], newToken(), time.Now()
	k := append(b.queue.keys.list(), cancelKey(m.id))
	if err := claimScript.Run(ctx, b.Redis, k, time.Minute.Milliseconds(), m.gid, m.raw, token, m.token).Err(); err != nil {
		return 0, 0, 0, err
	}
	claimed := time.Now()
	resp, err := b.Client.Post(b.URL, "application/json", bytes.NewReader(m.payload))
	if err != nil {
		return 0, 0, 0, err
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		return 0, 0, 0, err
	}
	answer := time.Now()
	r := answered(resp.StatusCode, body)
	result := r.append(nil, m, b.queue, 1, "", true, answer)
	done, err := publishScript.Run(ctx, b.Redis, b.queue.keys.list("bare-results", activeKey(m.id), cancelKey(m.id)), m.gid, token, result, m.token).Int64Slice()
	if err == nil && (len(done) != 1 || done[0] != 1) {
		err = fmt.Errorf("%s was not settled", m.id)
	}
	return claimed.Sub(began), answer.Sub(claimed), time.Since(answer), err
}

// ScriptHashes are the names under which Redis knows the scripts.
var ScriptHashes = map[string]string{
	"claim": claimScript.Hash(), "settle": publishScript.Hash(), "delay": delayScript.Hash(), "release": releaseScript.Hash(), "promote": promoteScript.Hash(),
}

// PrivateKeys are the keys of a queue; spread tells that a cluster cannot have it.
func PrivateKeys(queue string) (all []string, spread bool) {
	k := keysOf(queue)
	return k.list(), k.spread()
}
