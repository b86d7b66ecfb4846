package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Submission is one request for a queue.
type Submission struct {
	ID          string            `json:"id"`
	Deadline    int64             `json:"deadline"` // Unix seconds
	Payload     json.RawMessage   `json:"payload"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	Endpoint    string            `json:"endpoint,omitempty"`
	ResultQueue string            `json:"result_queue_name,omitempty"`

	Once bool `json:"-"` // it is not enqueued while its ID is in work
}

// ErrActive tells that a Submission with Once was not enqueued.
var ErrActive = errors.New("a request of this id is in work")

// ErrSubmission tells that a Submission makes no sense; nothing was enqueued.
var ErrSubmission = errors.New("the request cannot be enqueued")

// cancelTTL is how long a cancellation is remembered.
const cancelTTL = 7 * 24 * time.Hour

// Enqueue puts a request into a queue as producers of llm-d do: in one transaction, in which earlier
// cancellations of its ID end. It returns an error that wraps ErrSubmission for a request without ID,
// result list, payload, or a deadline in the future, and ErrActive.
func Enqueue(ctx context.Context, r redis.UniversalClient, queue string, s Submission, now time.Time) error {
	left := time.Unix(s.Deadline, 0).Sub(now)
	switch {
	case s.ID == "":
		return fmt.Errorf("%w: id is missing", ErrSubmission)
	case s.Deadline <= 0:
		return fmt.Errorf("%w: deadline is missing", ErrSubmission)
	case left <= 0:
		return fmt.Errorf("%w: deadline has passed", ErrSubmission)
	case s.ResultQueue == "":
		return fmt.Errorf("%w: result_queue_name is missing", ErrSubmission)
	case len(s.Payload) == 0 || s.Payload[0] != '{':
		return fmt.Errorf("%w: payload is no object", ErrSubmission)
	}
	token := newToken()
	data := []member{{"id", quoted(s.ID)}, {"created", marshal(now.Unix())}, {"deadline", marshal(s.Deadline)}, {"payload", s.Payload}}
	if len(s.Metadata) > 0 {
		data = append(data, member{"metadata", marshal(s.Metadata)})
	}
	if len(s.Headers) > 0 {
		data = append(data, member{"headers", marshal(s.Headers)})
	}
	if s.Endpoint != "" {
		data = append(data, member{"endpoint", quoted(s.Endpoint)})
	}
	envelope := encode([]member{
		{"internal", encode([]member{{"request_token", quoted(token)}, {"request_queue_name", quoted(queue)}, {"result_queue_name", quoted(s.ResultQueue)}})},
		{"request_kind", []byte(`"redis"`)},
		{"data", encode(data)},
	})
	_, clustered := r.(*redis.ClusterClient)
	if s.Once {
		return enqueueOnce(ctx, r, clustered, queue, s, token, left, envelope)
	}
	pipe := r.TxPipeline()
	if clustered { // the keys are in different slots
		pipe = r.Pipeline()
	}
	pipe.Del(ctx, cancelKey(s.ID))
	pipe.Set(ctx, activeKey(s.ID), token, left)
	if clustered { // last, and only when the rest is there
		if _, err := pipe.Exec(ctx); err != nil {
			return fmt.Errorf("enqueue: %w", err)
		}
		pipe = r.Pipeline()
	}
	pipe.ZAdd(ctx, queue, redis.Z{Score: float64(s.Deadline), Member: envelope})
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	return nil
}

// mark begins scripts that mark an ID as in work, and ends those that find it marked. KEYS[1]: marker. ARGV: token,
// TTL in ms. The client repeats a command whose answer was lost: a marker with this very token is from the first
// time, when all else was done, too; the request may have been cancelled since.
const mark = `
if redis.call('GET', KEYS[1]) == ARGV[1] then return 1 end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end`

var (
	markScript = redis.NewScript(mark + `
return 1`)
	// onceScript enqueues a request unless its ID is in work. KEYS: marker, cancellation, queue. ARGV: token, TTL,
	// score, member.
	onceScript = redis.NewScript(mark + `
redis.call('DEL', KEYS[2])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[4])
return 1`)
)

// enqueueOnce is the rest of Enqueue. In a cluster, where the keys are in different slots, a process that dies
// on the way leaves the ID marked until the deadline.
func enqueueOnce(ctx context.Context, r redis.UniversalClient, clustered bool, queue string, s Submission, token string, left time.Duration, envelope []byte) error {
	ms := max(1, left.Milliseconds())
	if !clustered {
		n, err := onceScript.Run(ctx, r, []string{activeKey(s.ID), cancelKey(s.ID), queue}, token, ms, s.Deadline, envelope).Int()
		if err == nil && n == 0 {
			err = ErrActive
		}
		if err != nil {
			return fmt.Errorf("enqueue: %w", err)
		}
		return nil
	}
	n, err := markScript.Run(ctx, r, []string{activeKey(s.ID)}, token, ms).Int()
	if err == nil && n == 0 {
		err = ErrActive
	}
	if err == nil {
		err = r.Del(ctx, cancelKey(s.ID)).Err()
	}
	if err == nil {
		if err = r.ZAdd(ctx, queue, redis.Z{Score: float64(s.Deadline), Member: envelope}).Err(); err != nil {
			_ = dropMarker.Run(ctx, r, []string{activeKey(s.ID)}, token).Err() // it expires by itself
		}
	}
	if err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	return nil
}

// cancelScript marks the present generation of a request as cancelled. In a cluster its keys may be
// in different slots, so there it is done in two steps.
var cancelScript = redis.NewScript(`
local token = redis.call('GET', KEYS[1])
if not token then return 0 end
redis.call('SET', KEYS[2], token, 'EX', ARGV[1])
return 1`)

// Cancel cancels a request. It reports false for one that is unknown or has its result.
func Cancel(ctx context.Context, r redis.UniversalClient, id string) (bool, error) {
	if _, clustered := r.(*redis.ClusterClient); clustered {
		token, err := r.Get(ctx, activeKey(id)).Result()
		if errors.Is(err, redis.Nil) {
			return false, nil
		}
		if err == nil {
			err = r.Set(ctx, cancelKey(id), token, cancelTTL).Err()
		}
		return err == nil, err
	}
	n, err := cancelScript.Run(ctx, r, []string{activeKey(id), cancelKey(id)}, int64(cancelTTL/time.Second)).Int()
	return n == 1, err
}
