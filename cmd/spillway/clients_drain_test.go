package main

import (
	"context"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"spillway/router"
)

// told is what one client of a stopping front end saw.
type told struct {
	begun, ended time.Time
	status       int
	close        bool // the answer ends the connection
	reason, body string
	err          error
}

// put sends one request and takes its answer whole.
func put(client *http.Client, url, body string) told {
	got := told{begun: time.Now()}
	resp, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err == nil {
		got.status, got.close, got.reason = resp.StatusCode, resp.Close, resp.Header.Get("X-Spillway-Reason")
		var b []byte
		b, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		got.body = string(b)
	}
	got.err, got.ended = err, time.Now()
	return got
}

func (g told) whole() bool {
	return g.err == nil && g.status == 200 && strings.HasSuffix(g.body, "data: [DONE]\n\n") && !strings.Contains(g.body, "error")
}

func (g told) refused() bool {
	return g.err == nil && g.status == 503 && g.reason == "draining" && g.close &&
		g.body == `{"message":"Service is not ready","type":"service_unavailable","code":503}`
}

// stages are the times at which the log says that the process began to delay, drain and stop.
func (p *running) stages() (at []time.Time) {
	p.t.Helper()
	for _, m := range regexp.MustCompile(`time=(\S+) \S+ msg=stage `).FindAllStringSubmatch(p.stderr.String(), -1) {
		when, err := time.Parse(time.RFC3339Nano, m[1])
		if err != nil {
			p.t.Fatal(err)
		}
		at = append(at, when)
	}
	return at
}

// TestSIGTERMUnderLoad stops a front end whose clients never pause, and checks what each of them
// was told by the stage in which it asked: all are served until the delay is over, refused while
// running ones end, and nobody is left without an answer before the process stops.
func TestSIGTERMUnderLoad(t *testing.T) { inModes(t, testSIGTERMUnderLoad) }

func testSIGTERMUnderLoad(t *testing.T, mode router.Mode) {
	const delay, timeout = 700 * time.Millisecond, 1200 * time.Millisecond
	demo := start(t, nil, append([]string{"demo", "--http-port", "0", "--port", "0", "--count", "4", "--itl", "10ms", "--max-num-seqs", "64", "--kv-blocks", "65536",
		"--active-prefill-tokens-threshold", "None", "--drain-delay", delay.String(), "--drain-timeout", timeout.String()}, modeFlags(t, mode, 4)...)...)
	url := demo.await(`Front end: (\S+)\n`)
	addr := strings.TrimPrefix(url, "http://")
	var mu sync.Mutex
	var seen, long []told
	var clients sync.WaitGroup
	ctx, end := context.WithCancel(t.Context())
	for i := range 8 {
		transport := &http.Transport{DisableKeepAlives: i%2 == 0}
		clients.Go(func() {
			defer transport.CloseIdleConnections()
			for client := (&http.Client{Transport: transport}); ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
				got := put(client, url, shortChat)
				mu.Lock()
				seen = append(seen, got)
				mu.Unlock()
			}
		})
	}
	for i := range 6 { // these outlast the drain
		body := slowChat
		if i%2 == 0 {
			body = strings.Replace(body, `"stream":true,`, "", 1)
		}
		clients.Go(func() {
			got := put(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, url, body)
			mu.Lock()
			long = append(long, got)
			mu.Unlock()
		})
	}
	upload, err := call(ctx, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer upload.leave()
	if _, err := io.WriteString(upload, chatHead+"Content-Length: 1000\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the long ones run", func() bool { _, page := fetch(t, url+"/metrics"); return slots(t, page) >= 6 })

	began := time.Now()
	demo.signal(syscall.SIGTERM)
	if code := demo.exit(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	t.Logf("ended after %v, of which %v are delay and drain", time.Since(began).Round(time.Millisecond), delay+timeout)
	if err := upload.is(503, "Service is not ready"); err != nil {
		t.Errorf("an upload that outlasts the drain: %v", err)
	}
	end()
	clients.Wait()
	at := demo.stages()
	if len(at) != 3 {
		t.Fatalf("%d stages were logged, want delay, drain and stop", len(at))
	}
	if drain, stop := at[1].Sub(at[0]), at[2].Sub(at[1]); drain < delay-time.Millisecond || stop < timeout-time.Millisecond {
		t.Errorf("drained after %v and stopped %v later, want %v and, with requests that go on, %v", drain, stop, delay, timeout)
	}
	counts := map[string]int{}
	for _, got := range seen {
		kind, ok := judged(got, at)
		counts[kind]++
		if !ok {
			t.Errorf("%s: asked %v and ended %v after SIGTERM: %d %s %.200q, %v", kind, got.begun.Sub(at[0]), got.ended.Sub(at[0]), got.status, got.reason, got.body, got.err)
		}
	}
	t.Logf("clients: %v", counts)
	for _, kind := range []string{"in the delay", "in the drain"} {
		if counts[kind] == 0 {
			t.Errorf("no client asked %s: %v", kind, counts)
		}
	}
	for _, got := range long {
		if cut := got.status == 200 && got.err == nil && strings.HasSuffix(got.body, cutStream); !cut && !got.refused() {
			t.Errorf("a request that outlasts the drain: %d %q, %v; want an event that says so, or 503", got.status, got.body[max(0, len(got.body)-200):], got.err)
		}
	}
}

// judged names the stage in which a client asked and tells whether it got what it should. The
// times of the log are cut to milliseconds.
func judged(got told, at []time.Time) (stage string, ok bool) {
	const cut = time.Millisecond
	switch {
	case !got.begun.After(at[0]):
		return "before", got.whole() || got.ended.After(at[1]) && got.refused()
	case got.ended.Before(at[1]):
		return "in the delay", got.whole()
	case got.ended.Before(at[2]) && got.begun.After(at[1].Add(cut)):
		return "in the drain", got.refused()
	case got.ended.Before(at[2]):
		return "between the two", got.whole() || got.refused()
	}
	return "at the end", got.whole() || got.refused() || got.err != nil
}

// slots is how many reservations a page of metrics tells of.
func slots(t *testing.T, page string) (sum int) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^spillway_slots_inflight(?:\{.*\})? (\d+)$`).FindAllStringSubmatch(page, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}
