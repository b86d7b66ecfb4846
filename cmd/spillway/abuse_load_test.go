package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// hung is when a client has waited for too long: well beyond the limit that the front end has for
// a request, because a machine that runs all this is slow.
const hung = 60 * time.Second

// tally counts what clients got. It is safe for concurrent use.
type tally struct {
	mu       sync.Mutex
	outcomes map[string]int
	longest  time.Duration
	wrong    []string // the first few that were not legal
	wrongs   int
}

func (l *tally) add(outcome string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.outcomes == nil {
		l.outcomes = map[string]int{}
	}
	l.outcomes[outcome]++
	l.longest = max(l.longest, took)
}

func (l *tally) illegal(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wrongs++
	if len(l.wrong) < 20 {
		l.wrong = append(l.wrong, fmt.Sprintf("%.1500s", fmt.Sprintf(format, args...)))
	}
}

func (l *tally) count(outcome string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.outcomes[outcome]
}

// String lists the outcomes.
func (l *tally) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, o := range slices.Sorted(maps.Keys(l.outcomes)) {
		fmt.Fprintf(&b, "%8d  %s\n", l.outcomes[o], o)
	}
	fmt.Fprintf(&b, "the longest took %v", l.longest.Round(time.Millisecond))
	return b.String()
}

// request is what one client asks, and how it behaves.
type request struct {
	method, path, body string
	header             http.Header
	stream             bool
	status             int           // of the refusal that it must get; 0: it is a good one
	pinned             bool          // to one worker
	leaves             time.Duration // after so long; 0 does not
	hurried            bool          // by x-request-timeout-ms
	reads              int64         // and leaves after so many bytes; 0 reads all
	slow               bool          // reads slowly
}

// goodRequest is one that can only fail by a fault or for load.
func goodRequest(rng *rand.Rand) request {
	r := request{method: http.MethodPost, header: http.Header{"Content-Type": {"application/json"}}}
	text := strings.Repeat("Hello, worker. ", 1+rng.IntN(60))
	tokens := 1 + rng.IntN(60)
	r.stream = rng.IntN(5) < 3
	tail := ""
	if r.stream {
		tail = `,"stream":true`
		if rng.IntN(2) == 0 {
			tail += `,"stream_options":{"include_usage":true}`
		}
	}
	switch n := rng.IntN(10); {
	case n == 0:
		r.path, r.stream = "/v1/embeddings", false
		r.body = fmt.Sprintf(`{"model":"sim-model","input":%q}`, text)
	case n < 3:
		r.path = "/v1/completions"
		r.body = fmt.Sprintf(`{"model":"sim-model","max_tokens":%d,"ignore_eos":true,"prompt":%q%s}`, tokens, text, tail)
	default:
		r.path = "/v1/chat/completions"
		r.body = fmt.Sprintf(`{"model":"sim-model","max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":%q}]%s}`, tokens, text, tail)
	}
	return r
}

// anyRequest is one of a client of whatever kind.
func anyRequest(rng *rand.Rand) request {
	r := goodRequest(rng)
	switch n := rng.IntN(100); {
	case n < 8:
		r.leaves = time.Duration(1+rng.IntN(100_000)) * time.Microsecond
	case n < 14:
		r.reads = int64(1 + rng.IntN(3000))
	case n < 16:
		r.slow = true
	case n < 20:
		r.header.Set("X-Request-Timeout-Ms", fmt.Sprint(1+rng.IntN(300)))
		r.hurried = true
	case n < 23:
		r.header.Set("X-Worker-Instance-Id", fmt.Sprint(1+rng.IntN(abusedWorkers)))
		r.pinned = true
	case n < 33:
		return badRequest(r, rng)
	}
	return r
}

func badRequest(r request, rng *rand.Rand) request {
	kinds := []func(){
		func() { r.status, r.body = 400, r.body[:rng.IntN(len(r.body))] },
		func() { r.status, r.body = 400, r.body+"}" },
		func() { r.status, r.body = 400, `{"model":"sim-model"}` },
		func() { r.status, r.body = 400, `{"model":"sim-model","prompt":"x","messages":[{}],"stream":1}` },
		func() { r.status, r.body = 400, strings.Repeat("[", 100_000) },
		func() { r.status, r.body = 404, strings.Replace(r.body, "sim-model", "nobody", 1) },
		func() { r.status, r.path = 404, "/v1/nothing" },
		func() { r.status, r.method, r.body = 405, http.MethodPut, "" },
		func() { r.status, r.body = 413, r.body+strings.Repeat(" ", 1<<20) },
		func() { r.status = 415; r.header.Set("Content-Type", "text/plain") },
	}
	k := rng.IntN(len(kinds))
	if r.path == "/v1/embeddings" && k == 3 {
		k = 0 // embeddings are not streamed
	}
	kinds[k]()
	r.stream = false
	return r
}

// send lets clients come at the set rate until ctx ends, and waits until all have gone.
func (a *abuse) send(ctx context.Context) {
	var clients sync.WaitGroup
	defer clients.Wait()
	room := make(chan struct{}, abuseClients)
	begun := time.Now()
	for i := uint64(0); ; i++ {
		if due := begun.Add(time.Duration(float64(i) / *abuseRate * float64(time.Second))); !rest(ctx, nil, time.Until(due)) {
			return
		}
		select {
		case room <- struct{}{}:
		default:
			a.load.add("not sent: too many are waiting", 0)
			continue
		}
		clients.Go(func() {
			defer func() { <-room }()
			rng := a.random(1000 + i)
			if rng.IntN(50) == 0 {
				a.load.add(a.intrude(rng), 0)
				return
			}
			r := anyRequest(rng)
			asked := time.Now()
			got, problem := a.ask(a.t.Context(), &r, rng)
			if problem != nil {
				a.load.illegal("%s %s (%+v): %v", r.method, r.path, r.header, problem)
			}
			a.load.add(got, time.Since(asked))
		})
	}
}

// ask sends a request and judges what comes.
func (a *abuse) ask(ctx context.Context, r *request, rng *rand.Rand) (outcome string, problem error) {
	ctx, cancel := context.WithTimeout(ctx, hung)
	defer cancel()
	if r.leaves > 0 {
		defer time.AfterFunc(r.leaves, cancel).Stop()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, a.url+r.path, strings.NewReader(r.body))
	if err != nil {
		return "", err
	}
	req.Header = r.header.Clone()
	resp, err := a.http.Do(req)
	if err != nil {
		if r.leaves > 0 && ctx.Err() != nil {
			return "left before the head", nil
		}
		if r.status == 413 { // the front end does not read what it refuses
			return "413, without reading it", nil
		}
		return "no answer", err
	}
	defer resp.Body.Close()
	body := io.Reader(resp.Body)
	switch {
	case r.reads > 0:
		body = io.LimitReader(body, r.reads)
	case r.slow:
		body = &sluggish{body, rng}
	}
	got, err := io.ReadAll(body)
	if r.leaves > 0 && ctx.Err() != nil || int64(len(got)) == r.reads && r.reads > 0 {
		return "left in the middle", nil
	}
	return r.judge(resp, string(got), err)
}

// sluggish is a client that takes its time.
type sluggish struct {
	from io.Reader
	rng  *rand.Rand
}

// Read implements io.Reader.
func (s *sluggish) Read(p []byte) (int, error) {
	time.Sleep(time.Duration(s.rng.IntN(20)) * time.Millisecond)
	return s.from.Read(p[:min(len(p), 1+s.rng.IntN(200))])
}

// intrude is a client that does not keep to HTTP.
func (a *abuse) intrude(rng *rand.Rand) (outcome string) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	if err != nil {
		a.load.illegal("dial: %v", err)
		return "no connection"
	}
	defer conn.Close()
	const head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	said := []string{
		"", "\x16\x03\x01\x00\xa5\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", head, head + "Content-Length: 100\r\n\r\n{\"model\":",
		head + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
		head + "Content-Length: -1\r\n\r\n", head + "X: " + strings.Repeat("x", 2<<20),
	}[rng.IntN(9)]
	wait := time.Duration(rng.IntN(1000)) * time.Millisecond
	if rng.IntN(8) == 0 {
		wait = min(15*time.Second, *abuseDuration/4) // until the front end has had enough, or nearly
	}
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		a.load.illegal("deadline: %v", err)
	}
	_, _ = io.WriteString(conn, said) // the front end may have closed, which is right
	got, _ := io.ReadAll(conn)
	if len(got) == 0 {
		return "intruder: no answer"
	}
	var minor, status int
	if _, err := fmt.Sscanf(string(got), "HTTP/1.%d %d", &minor, &status); err != nil || status < 400 || status > 499 && status != 505 {
		a.load.illegal("an intruder that says %.300q got %.500q", said, got)
	}
	return fmt.Sprintf("intruder: %d", status)
}
