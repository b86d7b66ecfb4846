package proxy_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"spillway/proxy"
)

const (
	bodyMemory = "spillway_body_memory_bytes"
	noMemory   = "Service temporarily unavailable: The requests in flight leave no memory for this body (body-memory-mb), please retry later"
)

// number is n as the metrics page shows it.
func number(n int) string { return strconv.FormatFloat(float64(n), 'g', -1, 64) }

// uploading begins a chunked request with so many bytes of white space, and does not end it.
func uploading(f *front, size int) *raw {
	c := f.dial()
	_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
	_, _ = io.WriteString(c, fmt.Sprintf("%x\r\n%s", size+1, strings.Repeat(" ", size)))
	return c
}

// TestBodyMemory checks that unfinished bodies cannot hold more than they may, that one too many is
// told so, that who needs little is served all the same, and that all is given back.
func TestBodyMemory(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.BodyLimitMB, c.BodyMemoryMB = 1, 2 }}, served("w", s))
	if got := f.metric("spillway_body_memory_limit_bytes"); got != "2.097152e+06" {
		t.Errorf("the limit is %s, want 2 MiB", got)
	}
	held := []*raw{uploading(f, 700<<10), uploading(f, 600<<10)}
	eventually(t, "both are held", func() bool { return f.metric(bodyMemory) == number((11+10)*64<<10) })
	c := uploading(f, 800<<10) // 704 KiB are free: it cannot have more than half of them
	status, header := c.head()
	body := make([]byte, len(flat(503, "service_unavailable", noMemory)))
	_, err := io.ReadFull(c.br, body)
	if status != "HTTP/1.1 503 Service Unavailable" || string(body) != flat(503, "service_unavailable", noMemory) || err != nil {
		t.Errorf("a body too many = %q %q, %v", status, body, err)
	}
	for _, want := range []string{"Connection: close", "X-Spillway-Reason: body-memory", "X-Llm-D-Request-Dropped-Reason: rejected-saturated", "Retry-After: 1"} {
		if !strings.Contains(header, want+"\r\n") {
			t.Errorf("a body too many is answered with %q, want %s", header, want)
		}
	}
	big := chatBody[:len(chatBody)-1] + `,"x":"` + strings.Repeat("y", 100<<10) + `"}`
	f.chat(chatBody).is(t, "a short chat beside them", 200, reply)
	f.chat(big).is(t, "100 KiB beside them", 200, reply)
	if seen := s.seen(); len(seen) != 2 || seen[1].body != big {
		t.Errorf("the worker got %d requests, want the two whole ones", len(seen))
	}
	for series, want := range map[string]string{
		`spillway_rejections_total{model="unknown_model",reason="body-memory"}`:         "1",
		`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`:            "0",
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:              "2",
		`spillway_rejections_total{model="m",reason="body-memory"}`:                     "0",
		`spillway_upstream_retries_total{model="m",reason="capacity"}`:                  "0",
		`dynamo_frontend_model_migration_total{migration_type="new_request",model="m"}`: "0",
	} {
		if got := f.metric(series); got != want {
			t.Errorf("%s = %s, want %s", series, got, want)
		}
	}
	for _, c := range append(held, c) {
		_ = c.Close()
	}
	eventually(t, "all is given back", func() bool { return f.metric(bodyMemory) == "0" })
}

// TestEditedBodyMemory checks that the copy that an edit makes is counted too.
func TestEditedBodyMemory(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{aliases: map[string]string{"a": "m"}, proxy: func(c *proxy.Config) {
		c.BodyLimitMB, c.BodyMemoryMB, c.StripNvext = 1, 2, true
	}}, served("w", s))
	padded := func(model, more string, size int) string {
		head := `{"model":"` + model + `","messages":[{}],` + more + `"x":"`
		return head + strings.Repeat("y", size-len(head)-2) + `"}`
	}
	if g := f.chat(padded("m", "", 1<<20)); g.status != 200 {
		t.Errorf("the largest body = %d %s, want 200", g.status, g.body)
	}
	// Once is what came, once what is renamed, once what is left of that: two of these fit.
	f.chat(padded("a", `"nvext":{},`, 700<<10)).is(t, "edited twice", 503, flat(503, "service_unavailable", noMemory),
		"X-Spillway-Reason: body-memory", "Connection: close")
	if g := f.chat(padded("a", "", 700<<10)); g.status != 200 {
		t.Errorf("edited once = %d %s, want 200", g.status, g.body)
	}
	eventually(t, "all is given back", func() bool { return f.metric(bodyMemory) == "0" })
}

// TestUploadsOfAllKinds sends bodies of random sizes in both framings at once, some of which end
// early, through workers of which one fails: what arrives is what was sent, and begin checks that no
// memory stays claimed.
func TestUploadsOfAllKinds(t *testing.T) {
	good := newScript(t, func(c *conn, r received) { c.say(answer(200, jsonHeader, fmt.Sprint(len(r.body)))) })
	bad := newScript(t, func(c *conn, _ received) { c.reset() })
	f := begin(t, setup{proxy: func(c *proxy.Config) {
		c.BodyLimitMB, c.InhibitedDuration, c.CBFailureThreshold = 1, 0, 0
	}}, served("good", good), served("bad", bad))
	var clients sync.WaitGroup
	for i := range 8 {
		chance := rand.New(rand.NewPCG(1, uint64(i)))
		clients.Go(func() {
			for range 8 {
				size := len(chatBody) + 1 + chance.IntN(1<<(7+chance.IntN(13)))
				if chance.IntN(3) == 0 {
					size = len(chatBody) + (4<<10)<<(2*chance.IntN(4)) - chance.IntN(3)
				}
				if chance.IntN(4) == 0 {
					_ = uploading(f, min(size, 1<<20)).Close()
					continue
				}
				req, err := http.NewRequest(http.MethodPost, f.url+"/v1/chat/completions", io.MultiReader(strings.NewReader(chatBody), &spaces{size - len(chatBody)}))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Content-Type", "application/json")
				if chance.IntN(2) == 0 {
					req.ContentLength = int64(size)
				}
				if g := f.do(req); g.status != 200 || g.body != fmt.Sprint(size) {
					t.Errorf("%d bytes = %d %s, want 200 and their number", size, g.status, g.body)
				}
			}
		})
	}
	clients.Wait()
	for _, r := range append(good.seen(), bad.seen()...) {
		if strings.TrimRight(r.body, " ") != chatBody {
			t.Fatalf("a worker got %.200q of %d bytes, want what was sent", r.body, len(r.body))
		}
	}
	eventually(t, "all is given back", func() bool { return f.metric(bodyMemory) == "0" })
}

// TestBodyMemoryRange checks that the memory must do for the largest body and as much again.
func TestBodyMemoryRange(t *testing.T) {
	for _, tt := range []struct {
		limit, memory int
		want          string
	}{
		{45, 90, ""},
		{45, 89, "body-memory-mb: 89 is not within 90..1048576: at least twice body-limit-mb (45)"},
		{4096, 8192, ""},
		{1, 1<<20 + 1, "body-memory-mb: 1048577 is not within 2..1048576: at least twice body-limit-mb (1)"},
	} {
		cfg := proxy.DefaultConfig()
		cfg.BodyLimitMB, cfg.BodyMemoryMB = tt.limit, tt.memory
		if err := cfg.Validate(); err == nil && tt.want != "" || err != nil && err.Error() != tt.want {
			t.Errorf("Validate with limit %d and memory %d = %v, want %q", tt.limit, tt.memory, err, tt.want)
		}
	}
}
