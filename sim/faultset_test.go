package sim_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"spillway/sim"
)

type setFault struct {
	Fault       string
	Count, Hits int
	Left        float64 `json:"seconds_left"`
}

// faultsOf lists the faults of each worker.
func faultsOf(t *testing.T, url string) [][]setFault {
	t.Helper()
	_, data := get(t, url+"/sim/fault")
	var all [][]setFault
	for _, w := range decode[struct{ Workers []struct{ Faults []setFault } }](t, data).Workers {
		all = append(all, w.Faults)
	}
	return all
}

func set(t *testing.T, url, body string) {
	t.Helper()
	if code, data := post(t, url+"/sim/fault", body); code != 200 {
		t.Fatalf("POST /sim/fault %s = %d %s", body, code, data)
	}
}

func unset(t *testing.T, url, query string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, url+"/sim/fault"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if data, err := io.ReadAll(resp.Body); resp.StatusCode != 200 || err != nil {
		t.Fatalf("DELETE /sim/fault%s = %d %s, %v", query, resp.StatusCode, data, err)
	}
}

// codes are the statuses of n requests one after the other.
func codes(t *testing.T, url string, n int) string {
	t.Helper()
	var all []string
	for range n {
		code, _ := post(t, url+"/v1/completions", `{"prompt":"x","max_tokens":1}`)
		all = append(all, fmt.Sprint(code))
	}
	return strings.Join(all, " ")
}

func TestWhichRequestsAFaultHits(t *testing.T) {
	for _, tt := range []struct {
		faults []string
		want   string
		hits   []int
	}{
		{[]string{`{"fault":"429"}`}, "429 429 429 429 429 429", []int{6}},
		{[]string{`{"fault":"429","count":2}`}, "429 429 200 200 200 200", []int{2}},
		{[]string{`{"fault":"429","share":0.5}`}, "200 429 200 429 200 429", []int{3}},
		{[]string{`{"fault":"429","share":0.5,"count":2}`}, "200 429 200 429 200 200", []int{2}},
		{[]string{`{"fault":"429","count":2}`, `{"fault":"500","share":0.5}`}, "429 429 200 500 200 500", []int{2, 2}},
		{[]string{`{"fault":"429"}`, `{"fault":"429","count":1}`}, "429 200 200 200 200 200", []int{1}}, // replaced
		{[]string{`{"fault":"health-fail"}`, `{"fault":"health-ok"}`, `{"fault":"slow","factor":1}`}, "200 200 200 200 200 200", []int{0, 0, 0}},
	} {
		urls := serve(t, fast())
		for _, f := range tt.faults {
			set(t, urls[0], f)
		}
		if got := codes(t, urls[0], 6); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.faults, got, tt.want)
		}
		var hits []int
		for _, f := range faultsOf(t, urls[0])[0] {
			hits = append(hits, f.Hits)
		}
		if !slices.Equal(hits, tt.hits) {
			t.Errorf("%s: hits %v, want %v", tt.faults, hits, tt.hits)
		}
		unset(t, urls[0], "")
		if got := codes(t, urls[0], 1); got != "200" {
			t.Errorf("%s cleared: %s, want 200", tt.faults, got)
		}
	}
}

func TestFaultsOfOneWorker(t *testing.T) {
	cfg := fast()
	cfg.Count = 2
	urls := serve(t, cfg)
	set(t, urls[0], `{"fault":"500","worker":1}`)
	set(t, urls[1], `{"fault":"429","count":3}`)
	if got := codes(t, urls[0], 1) + " " + codes(t, urls[1], 1); got != "200 500" {
		t.Errorf("workers 0 and 1 answer %s, want 200 500", got)
	}
	unset(t, urls[0], "?worker=1&fault=500")
	if got := faultsOf(t, urls[0]); len(got[0]) != 0 || len(got[1]) != 1 || got[1][0] != (setFault{Fault: "429", Count: 3}) {
		t.Errorf("faults = %+v, want the 429 of worker 1", got)
	}
	if got := codes(t, urls[1], 4); got != "429 429 429 200" {
		t.Errorf("worker 1 answers %s", got)
	}
}

func TestFaultExpires(t *testing.T) {
	url := serve(t, fast())[0]
	set(t, url, `{"fault":"429","seconds":3600}`)
	if f := faultsOf(t, url)[0]; len(f) != 1 || f[0].Left <= 3000 || codes(t, url, 1) != "429" {
		t.Errorf("faults = %+v, want one with most of an hour left", f)
	}
	set(t, url, `{"fault":"429","seconds":0.001}`)
	for end := time.Now().Add(time.Minute); codes(t, url, 1) != "200"; {
		if time.Now().After(end) {
			t.Fatal("the fault does not end")
		}
	}
	if f := faultsOf(t, url)[0]; len(f) != 0 {
		t.Errorf("faults = %+v, want none", f)
	}
	// One that holds requests lets them go.
	set(t, url, `{"fault":"freeze","seconds":0.05}`)
	if got := codes(t, url, 1); got != "200" {
		t.Errorf("frozen for 50 ms: %s, want 200", got)
	}
}

func TestFreezeAndLies(t *testing.T) {
	url := serve(t, fast())[0]
	health := func() string {
		conn := dial(t, url)
		defer conn.Close()
		send(t, conn, "GET /health", "", "")
		got, end := drain(t, conn, 150*time.Millisecond)
		return strings.TrimPrefix(got[:min(len(got), 12)], "HTTP/1.1 ") + end
	}
	held := func(route, body string) net.Conn {
		conn := dial(t, url)
		send(t, conn, route, body, "")
		if got, end := drain(t, conn, 100*time.Millisecond); got != "" || end != staysSilent {
			t.Errorf("%s while frozen: %q, %s", route, got, end)
		}
		return conn
	}
	if got := health(); got != "200eof" {
		t.Errorf("health is %s, want 200", got)
	}
	set(t, url, `{"fault":"health-fail"}`)
	if got, codes := health(), codes(t, url, 1); got != "503eof" || codes != "200" {
		t.Errorf("health lies: %s and requests %s, want 503 and 200", got, codes)
	}
	unset(t, url, "?fault=health-fail")

	set(t, url, `{"fault":"freeze"}`)
	if got := health(); got != staysSilent {
		t.Errorf("health while frozen is %s", got)
	}
	set(t, url, `{"fault":"health-ok"}`)
	if got := health(); got != "200eof" {
		t.Errorf("health lies while frozen: %s, want 200", got)
	}
	var conns []net.Conn
	for _, route := range []string{"POST /v1/completions", "POST /tokenize", "GET /metrics", "GET /v1/models", "GET /version"} {
		conns = append(conns, held(route, unary))
	}
	if s := statsOf(t, url); s.Generated != 1 { // by the request before
		t.Errorf("%d tokens generated while frozen", s.Generated-1)
	}
	unset(t, url, "")
	for i, conn := range conns {
		if got, end := drain(t, conn, 20*time.Second); !strings.HasPrefix(got, "HTTP/1.1 200 ") || end != endsWhole {
			t.Errorf("thawed, request %d gets %.100q, %s", i, got, end)
		}
		_ = conn.Close()
	}

	set(t, url, `{"fault":"freeze","count":1}`) // a probe is no request
	if got := health(); got != "200eof" {
		t.Errorf("health while one request is frozen is %s, want 200", got)
	}
	defer held("POST /v1/completions", unary).Close()
	if got := codes(t, url, 1); got != "200" {
		t.Errorf("the second request gets %s, want 200", got)
	}
}

// A stream that is frozen amid its answer goes on when the fault is cleared.
func TestThawedStream(t *testing.T) {
	url := serve(t, fast())[0]
	set(t, url, `{"fault":"freeze-stream","after_tokens":2,"count":1}`)
	conn := dial(t, url)
	defer conn.Close()
	send(t, conn, "POST /v1/completions", streamed, "")
	first, end := drain(t, conn, 400*time.Millisecond)
	if strings.Count(first, `"text"`) != 2 || end != staysSilent {
		t.Fatalf("got %q, %s; want 2 tokens and silence", first, end)
	}
	unset(t, url, "")
	rest, end := drain(t, conn, 20*time.Second)
	if strings.Count(rest, `"text"`) != 4 || !strings.HasSuffix(rest, "[DONE]\n\n\r\n0\r\n\r\n") || end != endsWhole {
		t.Errorf("then %q, %s; want 4 more and the end", rest, end)
	}
	if s := statsOf(t, url); s.Cut != 0 || s.Finished != 1 {
		t.Errorf("stats = %+v, want one whole answer", s)
	}
}

// All that a fault holds ends with the client or the server, and its sequence with it.
func TestHeldRequestsEnd(t *testing.T) {
	cfg := fast()
	cfg.Count, cfg.Speed = 2, 1
	urls, stop := serveUntil(t, cfg)
	long := `{"prompt":"hello","max_tokens":100000,"stream":true}`
	for _, fault := range []string{"freeze", "silence", "freeze-stream", "oversized-event;bytes=67108864"} {
		conn := dial(t, urls[0])
		send(t, conn, "POST /v1/completions", long, fault)
		if fault != "freeze" {
			until(t, urls[0], "running", func(s stats) bool { return s.Running == 1 })
		}
		_ = conn.Close()
		until(t, urls[0], fault+": freed", func(s stats) bool { return s.Running+s.Used == 0 })
	}
	for _, fault := range []string{"freeze", "silence", "freeze-stream", "oversized-event;bytes=67108864", "both-lengths"} {
		conn := dial(t, urls[0])
		defer conn.Close()
		send(t, conn, "POST /v1/completions", long, fault)
	}
	until(t, urls[0], "running", func(s stats) bool { return s.Running == 4 })
	set(t, urls[0], `{"fault":"refuse","worker":1}`)
	set(t, urls[0], `{"fault":"freeze"}`)
	stop() // fails the test, or goleak does, if any of them is left
}

func TestRefuse(t *testing.T) {
	cfg := fast()
	cfg.Count = 2
	urls := serve(t, cfg)
	addr := strings.TrimPrefix(urls[1], "http://")
	refused := func() bool {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			_ = conn.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	idle := dial(t, urls[1])
	defer idle.Close()
	if _, err := io.WriteString(idle, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, end := drain(t, idle, 150*time.Millisecond); !strings.HasPrefix(got, "HTTP/1.1 200 ") || end != staysSilent {
		t.Fatalf("got %q, %s; want a 200 and a connection kept", got, end)
	}
	running := dial(t, urls[1])
	defer running.Close()
	send(t, running, "POST /v1/completions", `{"prompt":"x","max_tokens":2000,"stream":true}`, "")
	until(t, urls[0], "running", func(s stats) bool { return s.Running == 1 })

	set(t, urls[1], `{"fault":"refuse"}`) // on its own port
	if !refused() {
		t.Error("the worker takes connections")
	}
	if got, end := drain(t, idle, 20*time.Second); got != "" || end == staysSilent {
		t.Errorf("the idle connection got %q, %s; want it closed", got, end)
	}
	if got, end := drain(t, running, 20*time.Second); !strings.HasSuffix(got, "[DONE]\n\n\r\n0\r\n\r\n") || end != endsWhole {
		t.Errorf("the running request ended with %q, %s", got[max(0, len(got)-50):], end)
	}
	set(t, urls[0], `{"fault":"refuse","worker":1}`) // again
	if code, _ := post(t, urls[0]+"/sim/fault", `{"fault":"refuse","worker":0}`); code != 400 {
		t.Errorf("refusing on the last port = %d, want 400", code)
	}
	if f := faultsOf(t, urls[0]); !refused() || len(f[0]) != 0 || len(f[1]) != 1 {
		t.Errorf("refused = %v, faults = %+v", refused(), f)
	}
	unset(t, urls[0], "?worker=1")
	if got := codes(t, urls[1], 1); got != "200" {
		t.Errorf("then it answers %s, want 200", got)
	}
	again := dial(t, urls[1])
	defer again.Close()
	if _, err := io.WriteString(again, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, end := drain(t, again, 150*time.Millisecond); end != staysSilent {
		t.Errorf("then got %q, %s; want a connection kept", got, end)
	}
	for range 20 { // as fast as it goes
		set(t, urls[0], `{"fault":"refuse","worker":1}`)
		unset(t, urls[0], "?worker=1")
		if refused() {
			t.Fatal("refused after it was cleared")
		}
	}
}

func TestRefuseForAWhile(t *testing.T) {
	url := serve(t, fast())[0]
	set(t, url, `{"fault":"refuse","seconds":0.2}`)
	if _, err := net.Dial("tcp", strings.TrimPrefix(url, "http://")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial = %v, want refused", err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err == nil {
			_ = conn.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatalf("Dial = %v", err)
		}
	}
	if got := codes(t, url, 1); got != "200" {
		t.Errorf("then it answers %s, want 200", got)
	}
}

// Someone else takes the port in the meantime: the worker waits for it.
func TestRefuseWhenThePortIsTaken(t *testing.T) {
	url := serve(t, fast())[0]
	addr := strings.TrimPrefix(url, "http://")
	set(t, url, `{"fault":"refuse","seconds":0.2}`)
	var lc net.ListenConfig
	thief, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	conn := dial(t, url) // taken by nobody but the thief
	if _, end := drain(t, conn, 400*time.Millisecond); end != staysSilent {
		t.Errorf("the thief's connection: %s", end)
	}
	_ = conn.Close()
	_ = thief.Close()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			_ = conn.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatalf("Dial = %v", err)
		}
	}
}

// slow makes an engine's work take longer, so its sequences hold their memory longer too.
func TestSlow(t *testing.T) {
	url := serve(t, fast())[0]
	body := `{"prompt":"x","max_tokens":40}` // 39 steps of 0.1 ms
	set(t, url, `{"fault":"slow","factor":20}`)
	start := time.Now()
	post(t, url+"/v1/completions", body)
	if got := time.Since(start); got < 39*2*time.Millisecond {
		t.Errorf("slowed, 39 steps took %v, want 78 ms or more", got)
	}
	// A prefill that would take most of a minute is done soon when the fault is cleared.
	set(t, url, `{"fault":"slow","factor":1000}`)
	conn := dial(t, url)
	defer conn.Close()
	prompt := strings.Repeat("x", 4*100000) // 5 s of work, at a hundredth
	send(t, conn, "POST /v1/completions", `{"prompt":"`+prompt+`","max_tokens":1}`, "")
	until(t, url, "running", func(s stats) bool { return s.Running == 1 && s.Used > 0 })
	unset(t, url, "?fault=slow")
	if got, end := drain(t, conn, 20*time.Second); !strings.HasPrefix(got, "HTTP/1.1 200 ") || end != endsWhole {
		t.Errorf("got %q, %s", got, end)
	}
}

// The page of the docs has a row for each fault, and none for others.
func TestFaultsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/sim.md")
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for line := range bytes.Lines(page) {
		if name, ok := strings.CutPrefix(string(line), "| `"); ok {
			name, _, _ = strings.Cut(name, "`")
			rows = append(rows, name)
		}
	}
	names := sim.FaultNames()
	for _, name := range names {
		if !slices.Contains(rows, name) {
			t.Errorf("docs/sim.md has no row for %s", name)
		}
	}
	for _, row := range rows {
		if !slices.Contains(names, row) {
			t.Errorf("docs/sim.md has a row for %s, which is no fault", row)
		}
	}
}
