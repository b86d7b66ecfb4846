package proxy_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway/httperr"
	"spillway/proxy"
	"spillway/worker"
)

// ordeal is one request to n workers of which the first has a fault.
type ordeal struct {
	fault
	outcome        // without another worker
	mode    string // unary or stream
	body    string // of the request
	good    string // what the other workers answer
	n       int

	f       *front
	bad     *script     // nil: nobody listens, or it is a process
	process *simProcess // nil: it is none
	others  []*script
	log     *lines
	label   string // on every goroutine that descends from this test's
}

// endure sends the request and checks what comes of it: the answer, who was asked, what is said of
// the worker, the metrics, and that no booking, connection or goroutine is left.
func (o *ordeal) endure(t *testing.T) {
	o.label = fmt.Sprintf("%p", t)
	pprof.SetGoroutineLabels(pprof.WithLabels(t.Context(), pprof.Labels("ordeal", o.label)))
	workers := []worker.Worker{o.faulty(t)}
	for id := worker.ID(2); id <= worker.ID(o.n); id++ {
		s := newScript(t, byMode(saying(answer(200, jsonHeader, reply)), streaming(hello, ended+done)))
		o.others = append(o.others, s)
		workers = append(workers, worker.Worker{ID: id, Name: fmt.Sprintf("good%d", id), Models: []string{"m"}, Endpoint: s.url()})
	}
	o.log = &lines{}
	o.f = begin(t, setup{beside: true, log: o.log.logger(), proxy: func(c *proxy.Config) {
		c.ResponseHeaderTimeout, c.StreamInactivityTimeout = o.limit(), o.limit()
		c.CBFailureThreshold, c.InhibitedDuration, c.CBOpen = 1, long, long
	}}, workers...)
	var running int
	eventually(t, "all goroutines of the server run", func() bool {
		stacks := ""
		running, stacks = o.goroutines()
		return strings.Contains(stacks, "proxy.(*Server).tick") && strings.Contains(stacks, "http.(*Server).Serve")
	})

	free := o.f.inOrder("bad", "good2", "good3")
	o.answered(t, o.ask(t))
	free()
	o.asked(t)
	o.blamed(t)
	o.recorded(t)
	o.over(t, running)
}

// faulty is the worker with the fault.
func (o *ordeal) faulty(t *testing.T) worker.Worker {
	w := worker.Worker{ID: 1, Name: "bad", Models: []string{"m"}}
	switch {
	case o.worker != nil:
		o.bad = newScript(t, o.worker)
		w.Endpoint = o.bad.url()
	case o.stopped != never:
		o.process = newSimProcess(t)
		w.Endpoint = o.process.url()
	default:
		w.Endpoint = nobody(t)
	}
	return w
}

// limit is how long a worker may be silent.
func (o *ordeal) limit() time.Duration {
	switch waits := o.outcome.body == lateWorker || strings.Contains(o.outcome.body, lateWorkerEvent); {
	case !waits:
		return long
	case o.n > 1 && o.retry != "", o.stopped == midway:
		return 1500 * time.Millisecond // those that do answer have to be faster
	}
	return short
}

// retried tells whether another worker has to serve the request.
func (o *ordeal) retried() bool { return o.n > 1 && o.retry != "" }

// ask sends the request, and stops the worker's process when it is time.
func (o *ordeal) ask(t *testing.T) got {
	if o.process == nil {
		return o.f.chat(o.body)
	}
	if o.stopped == beforehand {
		o.process.stop()
		return o.f.chat(o.body)
	}
	body := strings.Replace(o.body, `"messages"`, `"max_tokens":50000,"ignore_eos":true,"messages"`, 1)
	answered := make(chan got, 1)
	begun := make(chan struct{})
	go func() {
		resp, err := o.f.client.Post(o.f.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			answered <- got{err: err}
			return
		}
		defer resp.Body.Close()
		br := bufio.NewReader(resp.Body)
		_, _ = br.Peek(1) // its error comes again
		close(begun)
		b, err := io.ReadAll(br)
		answered <- got{resp.StatusCode, resp.Header, string(b), err}
	}()
	if o.mode == "stream" {
		<-begun
	} else {
		o.process.stats(`"running":1`)
	}
	o.process.stop()
	g := <-answered
	if said, ok := strings.CutSuffix(g.body, o.outcome.body); ok && o.mode == "stream" {
		if !strings.HasPrefix(said, `data: {"id":`) || strings.Contains(said, "error") {
			t.Errorf("before its end the stream was %.500q, want what the worker said", said)
		}
		g.body = o.outcome.body
	}
	return g
}

// answered checks what the client got.
func (o *ordeal) answered(t *testing.T, g got) {
	status, body := o.status, o.outcome.body
	headers := append(slices.Clone(o.headers), "X-Spillway-Attempts: ", "X-Spillway-Worker: bad")
	if o.retried() {
		status, body = 200, o.good
		headers = []string{"X-Spillway-Attempts: 2", "X-Spillway-Worker: good2", "X-Spillway-Reason: ", "Retry-After: "}
	}
	if status == 200 && o.mode == "stream" {
		headers = append(headers, "Cache-Control: no-cache", "X-Accel-Buffering: no", "Content-Length: ")
		if kind := g.header.Get("Content-Type"); !strings.HasPrefix(kind, "text/event-stream") {
			t.Errorf("Content-Type: %s, want text/event-stream", kind)
		}
	} else {
		headers = append(headers, "Content-Type: application/json", "Cache-Control: ", fmt.Sprint("Content-Length: ", len(body)))
	}
	if id := g.header.Get("X-Request-Id"); len(id) != 36 {
		t.Errorf("X-Request-Id: %q, want one of 36 characters", id)
	}
	g.is(t, "chat", status, body, headers...)
	if strings.Contains(g.body, "secret") && status != 200 {
		t.Errorf("the client sees what the worker said: %s", g.body)
	}
}

// asked checks which workers saw the request, and how often.
func (o *ordeal) asked(t *testing.T) {
	if o.bad != nil {
		if accepted, _ := o.bad.connections(); len(o.bad.seen()) != 1 || accepted != 1 {
			t.Errorf("the worker was asked %d times on %d connections, want once", len(o.bad.seen()), accepted)
		}
	}
	for i, s := range o.others {
		want := 0
		if i == 0 && o.retried() {
			want = 1
		}
		if got := len(s.seen()); got != want {
			t.Errorf("worker good%d was asked %d times, want %d", i+2, got, want)
		}
	}
}

// blamed checks what is said of each worker from now on.
func (o *ordeal) blamed(t *testing.T) {
	snap := o.f.list().Snapshot()
	var routable, avoided []worker.ID
	for id := worker.ID(1); id <= worker.ID(o.n); id++ {
		if id > 1 || o.blame == innocent || o.blame == marked {
			routable = append(routable, id)
		}
	}
	if o.blame == marked {
		avoided = []worker.ID{1}
	}
	if !slices.Equal(snap.Routable, routable) || !slices.Equal(snap.Marked, avoided) {
		t.Errorf("routable are %v, marked %v; want %v and %v", snap.Routable, snap.Marked, routable, avoided)
	}
}

// recorded checks the metrics and the access record.
func (o *ordeal) recorded(t *testing.T) {
	count := func(yes bool) string {
		if yes {
			return "1"
		}
		return "0"
	}
	rejected := count(o.blame == marked && !o.retried())
	series := map[string]string{
		`spillway_worker_inhibited{worker="bad"}`:                                                                       count(o.blame == inhibited),
		`spillway_circuit_state{worker="bad"}`:                                                                          count(o.blame == inhibited || o.blame == tripped),
		`dynamo_frontend_model_migration_total{migration_type="new_request",model="m"}`:                                 count(o.retried()),
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:                                              "1",
		`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`:                                            rejected,
		`dynamo_frontend_disconnected_clients`:                                                                          "0",
		`dynamo_frontend_model_cancellation_total{endpoint="chat_completions",model="m",request_type="` + o.mode + `"}`: "0",
	}
	for _, reason := range httperr.Reasons {
		series[fmt.Sprintf(`spillway_rejections_total{model="m",reason=%q}`, reason)] = "0"
	}
	series[`spillway_rejections_total{model="m",reason="worker-overloaded"}`] = rejected
	for _, reason := range []string{"connect", "reset", "protocol", "timeout", "capacity", "status"} {
		series[fmt.Sprintf(`spillway_upstream_retries_total{model="m",reason=%q}`, reason)] = count(o.retried() && reason == o.retry)
	}
	for _, class := range []string{"2xx", "3xx", "4xx", "5xx"} {
		series[fmt.Sprintf(`spillway_upstream_responses_total{code_class=%q,worker="bad"}`, class)] = count(class == o.code)
		for id := 2; id <= o.n; id++ {
			series[fmt.Sprintf(`spillway_upstream_responses_total{code_class=%q,worker="good%d"}`, class, id)] = count(o.retried() && id == 2 && class == "2xx")
		}
	}
	for id := 2; id <= o.n; id++ {
		series[fmt.Sprintf(`spillway_worker_inhibited{worker="good%d"}`, id)] = "0"
		series[fmt.Sprintf(`spillway_circuit_state{worker="good%d"}`, id)] = "0"
	}
	cause, status := o.cause(), "error"
	if cause == "" || o.retried() {
		cause, status = "", "success"
	}
	series[fmt.Sprintf(`dynamo_frontend_requests_total{endpoint="chat_completions",error_type=%q,model="m",request_type=%q,status=%q}`, cause, o.mode, status)] = "1"
	eventually(t, "the request is logged", func() bool { return strings.Contains(o.log.String(), "msg=request ") })
	page := map[string]string{}
	for line := range strings.Lines(o.f.metrics()) {
		if i := strings.LastIndexByte(line, ' '); i > 0 {
			page[line[:i]] = strings.TrimSpace(line[i:])
		}
	}
	for name, want := range series {
		if got := page[name]; got != want {
			t.Errorf("%s = %s, want %s", name, got, want)
		}
	}
	record := o.log.String()
	if n := strings.Count(record, "msg=request "); n != 1 {
		t.Errorf("logged %s, want one record, not %d", record, n)
	}
	record, _, _ = strings.Cut(record[strings.Index(record, "msg=request "):], "\n")
	record += " "
	want := []string{fmt.Sprintf(" status=%d ", o.status), " worker=bad ", " attempts=1 "}
	if o.retried() {
		want = []string{" status=200 ", " worker=good2 ", " attempts=2 "}
	}
	if cause != "" {
		want = append(want, " error_type="+cause+" ")
	} else if strings.Contains(record, "error_type=") {
		t.Errorf("a success is logged as %s", record)
	}
	for _, part := range want {
		if strings.Count(record, part) != 1 {
			t.Errorf("logged %s, want one record with%s", record, part)
		}
	}
}

// cause is what metrics and the access record call the outcome.
func (o *ordeal) cause() string {
	switch {
	case o.blame == marked:
		return "overload"
	case o.status == 504, strings.Contains(o.outcome.body, lateWorkerEvent):
		return "response_timeout"
	case o.status == 503:
		return "unavailable"
	case o.status >= 500, strings.Contains(o.outcome.body, "error"):
		return "internal"
	case o.status >= 400:
		return "validation"
	}
	return ""
}

// over checks that nothing of the request is left while the server runs on: nothing is booked, only
// connections are open that can be used again, and no goroutine is there but running ones.
func (o *ordeal) over(t *testing.T, running int) {
	o.f.client.CloseIdleConnections()
	eventually(t, "the books are at zero", func() bool { return len(o.f.unsettled()) == 0 })
	if o.bad != nil && (o.after == severed || o.after == asBlamed && o.blame == inhibited) {
		eventually(t, "the worker's connection is closed", func() bool { _, open := o.bad.connections(); return open == 0 })
	}
	if o.process != nil {
		eventually(t, "the process's connection is closed", func() bool { return o.process.connected() == 0 })
		o.process.resume()
		o.process.stats(`"running":0`, `"waiting":0`)
		if o.stopped == midway {
			o.process.stats(`"aborted_requests":1`, `"finished_requests":0`)
		}
	}
	stacks := ""
	ok := func() bool {
		kept, n := 0, 0
		for _, s := range append(slices.Clone(o.others), o.bad) {
			if s != nil {
				_, open := s.connections()
				kept += open
			}
		}
		n, stacks = o.goroutines()
		return n == running+kept && kept <= 1+len(o.others)
	}
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not %d goroutines as before and one for each connection that is kept:\n%s", running, stacks)
		}
	}
}

// goroutines counts those that descend from the test's own. Labels are inherited.
func (o *ordeal) goroutines() (n int, stacks string) {
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		return 0, err.Error()
	}
	_, blocks, _ := strings.Cut(profile.String(), "\n") // the total
	for block := range strings.SplitSeq(blocks, "\n\n") {
		if strings.Contains(block, fmt.Sprintf(`"ordeal":%q`, o.label)) {
			var same int // with this stack
			_, _ = fmt.Sscanf(block, "%d @", &same)
			n += same
			stacks += block + "\n\n"
		}
	}
	return n, stacks
}

// nobody is an address at which nobody listens.
func nobody(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return "http://" + ln.Addr().String()
}
