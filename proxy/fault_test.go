package proxy_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"spillway/proxy"
	"spillway/worker"
)

// fault is a way in which a worker fails, and what has to follow from it.
type fault struct {
	name          string
	worker        func(*conn, received) // nil: nobody listens
	unary, stream outcome               // of the zero one, nothing is asked
}

// outcome is what a fault leads to where nobody else can serve the request.
type outcome struct {
	status  int
	body    string
	headers []string // of the answer, as "Name: value"
	retry   string   // why another worker is asked, where there is one; "": none is
	code    string   // class of the worker's answer; "": it has given none
	blame            // of the worker
}

// blame is what a worker has to bear.
type blame string

const (
	innocent  blame = ""
	marked    blame = "marked"
	tripped   blame = "tripped"
	inhibited blame = "tripped inhibited"
)

const (
	brokenOff   = `data: {"error":{"message":"The worker broke off the stream","type":"internal_server_error","code":500}}` + "\n\n" + done
	helloStream = hello + ended + done
)

// capacity is what a worker's refusal for capacity leads to.
func capacity(after, code string) outcome {
	return outcome{503, busyBody, []string{"X-Spillway-Reason: worker-overloaded", "Retry-After: " + after}, "capacity", code, marked}
}

func both(name string, worker func(*conn, received), o outcome) fault {
	return fault{name, worker, o, o}
}

// failing is the status of a worker that has failed, with the message that clients get.
func failing(status int, slug, message, retry string) outcome {
	return outcome{status, flat(status, slug, message), []string{"X-Spillway-Reason: ", "Retry-After: "}, retry, "5xx", tripped}
}

const (
	failedMessage   = "The worker failed to process the request"
	unavailableText = "Service temporarily unavailable: the worker is not available"
)

// event begins a stream with an error object.
func event(code int) string {
	return fmt.Sprintf(`data: {"error":{"message":"secret","type":"x","code":%d}}`+"\n\n", code)
}

// byMode answers a request by what it asked for.
func byMode(unary, stream func(*conn, received)) func(*conn, received) {
	return func(c *conn, r received) {
		if strings.Contains(r.body, `"stream":true`) {
			stream(c, r)
		} else {
			unary(c, r)
		}
	}
}

// faults are all of them. Limits are set so that a worker's silence ends in a moment.
func faults() []fault {
	lost := func(retry, code string) outcome { return outcome{502, badGateway, nil, retry, code, inhibited} }
	late := func(retry, code string) outcome { return outcome{504, lateWorker, nil, retry, code, inhibited} }
	broken := func(body string) outcome { return outcome{200, body, nil, "", "2xx", inhibited} }
	half := answer(200, jsonHeader, reply)[:150]
	then := func(end func(*conn), parts ...string) func(*conn, received) {
		return func(c *conn, _ received) {
			for _, p := range parts {
				c.say(p)
			}
			end(c)
		}
	}
	huge := chunk("data: " + strings.Repeat("x", 17<<20))
	reset, hangUp, silent := (*conn).reset, (*conn).hangUp, (*conn).gone
	return []fault{
		both("connection refused", nil, lost("connect", "")),
		both("reset before the head", then(reset), lost("reset", "")),
		both("closed before the head", then(hangUp), lost("reset", "")),
		{"reset in the middle", byMode(then(reset, half), then(reset, streamHead+chunk(hello))), lost("reset", "2xx"), broken(hello + brokenOff)},
		{"reset before the first event", byMode(then(reset, half), then(reset, streamHead+chunk(hello[:9]))), lost("reset", "2xx"), lost("reset", "2xx")},
		{"an end without [DONE]", byMode(then(hangUp, half), streaming(hello)), lost("reset", "2xx"), broken(hello + brokenOff)},
		{"an end without [DONE], but with all said", streaming(hello, ended), outcome{}, outcome{200, hello + ended + done, nil, "", "2xx", innocent}},
		{"frozen before the head", then(silent), late("", ""), late("timeout", "")},
		{"frozen in the head", then(silent, "HTTP/1.1 200 OK\r\nConte"), late("", ""), late("timeout", "")},
		{"frozen after the head", byMode(then(silent, half[:strings.Index(half, "{")]), then(silent, streamHead)), late("timeout", "2xx"), late("timeout", "2xx")},
		{"frozen in the middle", byMode(then(silent, half), then(silent, streamHead+chunk(hello))), late("timeout", "2xx"), broken(hello + lateWorkerEvent + done)},
		both("garbage", then(silent, "SSH-2.0-x\r\n"), lost("protocol", "")),
		{"garbage for a chunk", byMode(
			then(silent, "HTTP/1.1 200 OK\r\n"+jsonHeader+"Transfer-Encoding: chunked\r\n\r\n"+chunk(reply[:9])+"zz\r\n"),
			then(silent, streamHead+chunk(hello)+"zz\r\n")), lost("protocol", "2xx"), broken(hello + brokenOff)},
		{"two lengths", byMode(
			then(silent, "HTTP/1.1 200 OK\r\n"+jsonHeader+"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
			then(silent, strings.Replace(streamHead, "\r\n\r\n", "\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 1)+chunk(hello))), lost("protocol", ""), lost("protocol", "")},
		{"a length and chunks", byMode( // chunks count, and the connection is not used again
			then(silent, "HTTP/1.1 200 OK\r\n"+jsonHeader+"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(reply)+chunk("")),
			then(silent, strings.Replace(streamHead, "\r\n\r\n", "\r\nContent-Length: 5\r\n\r\n", 1)+chunk(helloStream)+chunk(""))),
			outcome{200, reply, nil, "", "2xx", innocent}, outcome{200, helloStream, nil, "", "2xx", innocent}},
		both("an oversized header", then(silent, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 1<<20)+"\r\n\r\n"), lost("protocol", "")),
		{"an oversized event", then(silent, streamHead, huge), outcome{}, lost("protocol", "2xx")},
		both("429", saying(answer(429, jsonHeader, "{}")), capacity("1", "4xx")),
		both("429 with a time", saying(answer(429, "Retry-After: 7\r\n", "")), capacity("7", "4xx")),
		both("529", saying(answer(529, "", "")), capacity("1", "5xx")),
		both("503 of load", saying(answer(503, jsonHeader, `{"error":"overloaded"}`)), capacity("1", "5xx")),
		both("503 with a time", saying(answer(503, "Retry-After: 9\r\n", "")), capacity("9", "5xx")),
		both("503 of another kind", saying(answer(503, "", "starting")), failing(503, "service_unavailable", unavailableText, "status")),
		both("500", saying(answer(500, "", "secret")), failing(500, "internal_server_error", failedMessage, "")),
		both("502", saying(answer(502, "", "secret")), failing(502, "bad_gateway", failedMessage, "status")),
		both("504 of the worker", saying(answer(504, "", "secret")), failing(504, "gateway_timeout", failedMessage, "status")),
		both("400", saying(answer(400, jsonHeader, "{}")), outcome{400, "{}", nil, "", "4xx", innocent}),
		{"an error event first, 500", streaming(event(500), done), outcome{}, withCode(failing(500, "internal_server_error", failedMessage, ""), "2xx")},
		{"an error event first, 502", streaming(event(502), done), outcome{}, withCode(failing(502, "bad_gateway", failedMessage, "status"), "2xx")},
		{"an error event first, 503", streaming(event(503), done), outcome{}, withCode(failing(503, "service_unavailable", unavailableText, "status"), "2xx")},
		{"an error event first, 429", streaming(event(429), done), outcome{}, capacity("1", "2xx")},
		{"an error event first, 400", streaming(event(400), done), outcome{}, outcome{400, flat(400, "bad_request", "The worker refused the request"), nil, "", "2xx", innocent}},
		{"an error event later", streaming(hello, event(500), done), outcome{}, outcome{200, hello + event(500) + done, nil, "", "2xx", tripped}},
	}
}

func withCode(o outcome, code string) outcome { o.code = code; return o }

// TestFaults has every fault, for both kinds of request, with and without other workers. begin
// checks after each that nothing is booked and that no connection or goroutine is left.
func TestFaults(t *testing.T) {
	for _, fl := range faults() {
		for _, mode := range []struct {
			name, body, good string
			outcome
		}{{"unary", chatBody, reply, fl.unary}, {"stream", streamBody, helloStream, fl.stream}} {
			if mode.status == 0 {
				continue
			}
			for _, n := range []int{1, 3} {
				t.Run(fmt.Sprintf("%s/%s/%d", fl.name, mode.name, n), func(t *testing.T) {
					suffer(t, fl.worker, mode.body, mode.good, mode.outcome, n)
				})
			}
		}
	}
}

// suffer sends one request to n workers of which the first has the fault.
func suffer(t *testing.T, faulty func(*conn, received), body, good string, want outcome, n int) {
	bad := worker.Worker{ID: 1, Name: "bad", Models: []string{"m"}, Endpoint: nobody(t)}
	if faulty != nil {
		bad.Endpoint = newScript(t, faulty).url()
	}
	workers := []worker.Worker{bad}
	for id := worker.ID(2); id <= worker.ID(n); id++ {
		s := newScript(t, byMode(saying(answer(200, jsonHeader, reply)), streaming(hello, ended+done)))
		workers = append(workers, worker.Worker{ID: id, Name: fmt.Sprintf("good%d", id), Models: []string{"m"}, Endpoint: s.url()})
	}
	limit := long
	if want.body == lateWorker || strings.Contains(want.body, lateWorkerEvent) {
		limit = short
		if n > 1 && want.retry != "" {
			limit = 1500 * time.Millisecond // the good ones have to be faster
		}
	}
	f := begin(t, setup{proxy: func(c *proxy.Config) {
		c.ResponseHeaderTimeout, c.StreamInactivityTimeout = limit, limit
		c.CBFailureThreshold, c.InhibitedDuration, c.CBOpen = 1, long, long
	}}, workers...)

	g := f.chat(body)
	retried := n > 1 && want.retry != ""
	if retried {
		g.is(t, "chat", 200, good, "X-Spillway-Attempts: 2", "X-Spillway-Worker: good2", "X-Spillway-Reason: ", "Retry-After: ")
	} else {
		g.is(t, "chat", want.status, want.body, append(want.headers, "X-Spillway-Attempts: ", "X-Spillway-Worker: bad")...)
	}
	if strings.Contains(g.body, "secret") && want.status != 200 {
		t.Errorf("the client sees what the worker said: %s", g.body)
	}

	count := func(yes bool) string {
		if yes {
			return "1"
		}
		return "0"
	}
	series := map[string]string{
		`spillway_worker_inhibited{worker="bad"}`:                                       count(want.blame == inhibited),
		`spillway_circuit_state{worker="bad"}`:                                          count(want.blame == inhibited || want.blame == tripped),
		`dynamo_frontend_model_migration_total{migration_type="new_request",model="m"}`: count(retried),
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:              "1",
		`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`:            count(want.blame == marked && !retried),
		`spillway_rejections_total{model="m",reason="worker-overloaded"}`:               count(want.blame == marked && !retried),
		`dynamo_frontend_disconnected_clients`:                                          "0",
	}
	for _, reason := range []string{"connect", "reset", "protocol", "timeout", "capacity", "status"} {
		series[fmt.Sprintf(`spillway_upstream_retries_total{model="m",reason=%q}`, reason)] = count(retried && reason == want.retry)
	}
	for _, class := range []string{"2xx", "3xx", "4xx", "5xx"} {
		series[fmt.Sprintf(`spillway_upstream_responses_total{code_class=%q,worker="bad"}`, class)] = count(class == want.code)
	}
	for id := 2; id <= n; id++ {
		series[fmt.Sprintf(`spillway_worker_inhibited{worker="good%d"}`, id)] = "0"
		series[fmt.Sprintf(`spillway_circuit_state{worker="good%d"}`, id)] = "0"
		series[fmt.Sprintf(`spillway_upstream_responses_total{code_class="2xx",worker="good%d"}`, id)] = count(retried && id == 2)
	}
	for name, want := range series {
		if got := f.metric(name); got != want {
			t.Errorf("%s = %s, want %s", name, got, want)
		}
	}
	if got := len(f.list().Snapshot().Marked) == 1; got != (want.blame == marked) {
		t.Errorf("marked = %v, want %v", got, want.blame == marked)
	}
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
