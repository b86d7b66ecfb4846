package dispatch

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// message is one request as it lies in a queue. It is not changed after parse.
type message struct {
	raw   []byte  // the member of the queue, byte for byte
	score float64 // in the queue
	gid   string  // of the generation: what leases are kept under

	id, token string
	deadline  time.Time // zero if there is none
	created   int64     // Unix seconds, 0 if not said
	payload   json.RawMessage
	metadata  map[string]string
	headers   map[string]string
	endpoint  string
	queue     string // that it was put into, as far as it says
	results   string // list that the producer wants its result in, or ""
	labels    map[string]string
	retries   int // all of them
	attempts  int // of them those that count
	sheds     int // refusals for overload in a row
}

// envelope is what is read of a member.
type envelope struct {
	Internal struct {
		RetryCount  int               `json:"retry_count"`
		Token       string            `json:"request_token"`
		ResultQueue string            `json:"result_queue_name"`
		Queue       string            `json:"request_queue_name"`
		Labels      map[string]string `json:"labels"`
		Spillway    struct {
			Attempts int `json:"attempts"`
			Sheds    int `json:"sheds"`
		} `json:"spillway"`
	} `json:"internal"`
	Kind string       `json:"request_kind"`
	Data *requestData `json:"data"`
}

type requestData struct {
	ID       string            `json:"id"`
	Created  int64             `json:"created"`
	Deadline int64             `json:"deadline"`
	Payload  json.RawMessage   `json:"payload"`
	Metadata map[string]string `json:"metadata"`
	Headers  map[string]string `json:"headers"`
	Endpoint string            `json:"endpoint"`
}

// parse reads a member. On an error the message has what could be read, at least raw, score and gid.
func parse(raw string, score float64) (*message, error) {
	m := &message{raw: []byte(raw), score: score}
	var e envelope
	err := json.Unmarshal(m.raw, &e) // of what is of the wrong type alone it reads the rest
	m.token, m.queue, m.results, m.labels = e.Internal.Token, e.Internal.Queue, e.Internal.ResultQueue, e.Internal.Labels
	m.retries, m.attempts, m.sheds = e.Internal.RetryCount, e.Internal.Spillway.Attempts, e.Internal.Spillway.Sheds
	if d := e.Data; d != nil {
		m.id, m.created, m.payload, m.metadata, m.headers, m.endpoint = d.ID, d.Created, d.Payload, d.Metadata, d.Headers, d.Endpoint
		if d.Deadline > 0 {
			m.deadline = time.Unix(d.Deadline, 0)
		}
	}
	if m.gid = m.id + "\x1f" + m.token; m.token == "" {
		sum := sha256.Sum256(m.raw)
		m.gid += hex.EncodeToString(sum[:8])
	}
	switch {
	case err != nil:
		return m, fmt.Errorf("the envelope: %w", err)
	case e.Data == nil:
		return m, errors.New("data is missing")
	case m.id == "":
		return m, errors.New("data.id is missing")
	case e.Kind != "plain" && e.Kind != "redis" && e.Kind != "pubsub":
		return m, fmt.Errorf("request_kind is %q", e.Kind)
	}
	return m, nil
}

// invalid tells why a message that could be read cannot be sent, or nil.
func (m *message) invalid() error {
	if m.deadline.IsZero() {
		return errors.New("deadline is missing")
	}
	if p := bytes.TrimLeft(m.payload, " \t\r\n"); len(p) == 0 || p[0] != '{' {
		return errors.New("payload is no object")
	}
	return checkEndpoint(m.endpoint)
}

// expired tells whether it is too late.
func (m *message) expired(now time.Time) bool { return !m.deadline.IsZero() && !now.Before(m.deadline) }

// rewritten is the member for a further attempt. All but the counts stays as it came, byte for byte:
// numbers, order and fields that we do not know.
func (m *message) rewritten(queue *Queue, attempts, sheds int) ([]byte, error) {
	top, err := members(m.raw)
	if err != nil {
		return nil, err
	}
	var internal []member
	if at := find(top, "internal"); at >= 0 && string(top[at].value) != "null" {
		if internal, err = members(top[at].value); err != nil {
			return nil, err
		}
	}
	number := func(n int) []byte { return strconv.AppendInt(nil, int64(n), 10) }
	internal = set(internal, "retry_count", number(m.retries+1))
	for key, text := range map[string]string{"queue_id": queue.ID, "request_queue_name": queue.Name} {
		if at := find(internal, key); at < 0 || string(internal[at].value) == `""` {
			internal = set(internal, key, quoted(text))
		}
	}
	internal = set(internal, "spillway", encode([]member{{"attempts", number(attempts)}, {"sheds", number(sheds)}}))
	return encode(set(top, "internal", encode(internal))), nil
}

// member is one field of an object, its value as it was written.
type member struct {
	key   string
	value json.RawMessage
}

// members takes an object apart, in its order.
func members(raw []byte) ([]member, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("no object: %v, %w", t, err)
	}
	var all []member
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, err
		}
		var m member
		m.key, _ = t.(string) // keys are
		if err := dec.Decode(&m.value); err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// find is the index of a key, of the last one if there are several, as encoding/json has it.
func find(all []member, key string) int {
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].key == key {
			return i
		}
	}
	return -1
}

func set(all []member, key string, value []byte) []member {
	if at := find(all, key); at >= 0 {
		all[at].value = value
		return all
	}
	return append(all, member{key, value})
}

func encode(all []member) []byte {
	b := []byte{'{'}
	for i, m := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, quoted(m.key)...), ':'), m.value...)
	}
	return append(b, '}')
}

// quoted is text as JSON, without the escapes that only pages of HTML need.
func quoted(text string) []byte { return marshal(text) }

// marshal is json.Marshal of what cannot fail, without escapes for HTML.
func marshal(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("dispatch: " + err.Error())
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
