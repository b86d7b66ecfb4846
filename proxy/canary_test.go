package proxy_test

import (
	"encoding/json"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"spillway/proxy"
)

func canary(after time.Duration) func(*proxy.Config) {
	return func(c *proxy.Config) { c.CanaryAfter = after }
}

// TestCanary checks what a canary asks of a worker, and what its answer leads to.
func TestCanary(t *testing.T) {
	for _, tt := range []struct {
		name    string
		worker  func(*conn, received)
		state   string
		circuit string
		marked  bool
	}{
		{"200", saying(answer(200, jsonHeader, reply)), "unknown", "0", false},
		{"400", saying(answer(400, jsonHeader, "{}")), "unknown", "0", false},
		{"429", saying(answer(429, jsonHeader, "{}")), "unknown", "0", true},
		{"503 with a time", saying(answer(503, "Retry-After: 5\r\n", "")), "unknown", "0", true},
		{"500", saying(answer(500, jsonHeader, "{}")), "inhibited", "1", false},
		{"reset", func(c *conn, _ received) { c.reset() }, "inhibited", "1", false},
		{"cut short", func(c *conn, _ received) { c.say(answer(200, jsonHeader, reply)[:150]); c.hangUp() }, "inhibited", "1", false},
		{"silence", saysThen(), "inhibited", "1", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, tt.worker)
			w := served("w", s)
			w.APIKey = "secret"
			f := begin(t, setup{proxy: func(c *proxy.Config) {
				c.CanaryAfter = time.Millisecond
				if tt.name == "silence" {
					c.CanaryTimeout = short
				}
				c.CBFailureThreshold, c.InhibitedDuration = 1, long
			}}, w)
			f.metrics()
			eventually(t, "two canaries, or one that fails", func() bool {
				if tt.circuit != "0" {
					return f.circuit("w") == tt.circuit
				}
				return len(s.seen()) >= 2
			})
			if got := f.states() + " " + f.circuit("w"); got != "w:"+tt.state+" "+tt.circuit {
				t.Errorf("afterwards %s, want w:%s %s", got, tt.state, tt.circuit)
			}
			if got := len(f.list().Snapshot().Marked) > 0; got != tt.marked {
				t.Errorf("marked = %v, want %v", got, tt.marked)
			}
			r := s.seen()[0]
			var asked struct {
				Model     string
				Messages  []any
				MaxTokens int `json:"max_tokens"`
			}
			if err := json.Unmarshal([]byte(r.body), &asked); err != nil || asked.Model != "m" || len(asked.Messages) != 1 || asked.MaxTokens != 1 {
				t.Errorf("canary %s, %v, want one message and one token for m", r.body, err)
			}
			if r.path != "/v1/chat/completions" || r.header.Get("Authorization") != "Bearer secret" || r.header.Get("Content-Type") != "application/json" {
				t.Errorf("canary to %s with %v", r.path, r.header)
			}
		})
	}
}

// TestCanaryOnlyAfterSilence checks that requests which succeed spare a worker the canary, and
// that without the setting there is none.
func TestCanaryOnlyAfterSilence(t *testing.T) {
	for _, after := range []time.Duration{0, long} {
		s := newScript(t, saying(answer(200, jsonHeader, reply)))
		f := begin(t, setup{proxy: canary(after)}, served("w", s))
		f.chat(chatBody).is(t, "chat", 200, reply)
		time.Sleep(3 * short) // several ticks; a slow machine only makes it pass
		if n := len(s.seen()); n != 1 {
			t.Errorf("canary-after %v: %d requests, want the client's alone", after, n)
		}
	}
}

// TestCanaryClosesCircuit checks that a worker which nobody asks can come back.
func TestCanaryClosesCircuit(t *testing.T) {
	var mended atomic.Bool
	s := newScript(t, func(c *conn, r received) {
		switch {
		case mended.Load():
			c.say(answer(200, jsonHeader, reply))
		case strings.Contains(r.body, `"max_tokens":1`):
			c.say(answer(500, "", ""))
		default:
			c.t.Error("a request that is no canary")
			c.hangUp()
		}
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { breaking(1, short)(c); canary(time.Millisecond)(c) }}, served("w", s))
	eventually(t, "the circuit is open", func() bool { return f.circuit("w") == "1" })
	mended.Store(true)
	eventually(t, "the circuit is closed", func() bool { return f.circuit("w") == "0" })
}
