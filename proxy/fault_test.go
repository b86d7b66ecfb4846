package proxy_test

import (
	"fmt"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// fault is a way in which a worker fails, and what has to follow from it.
type fault struct {
	name          string
	worker        func(*conn, received) // nil: a process that is stopped, or nobody
	stopped       moment                // of a simulated worker's process
	after         connection            // to the worker
	unary, stream outcome               // of the zero one, nothing is asked
}

// moment is when a worker's process is stopped, as a hanging driver or a debugger does: the kernel
// goes on accepting connections for it.
type moment int

const (
	never      moment = iota
	beforehand        // before the request
	midway            // while it generates; of a stream, when the first byte has come
)

// connection is what has to become of a connection to a worker.
type connection int

const (
	asBlamed connection = iota // it is closed if the worker is inhibited
	kept                       // the worker is inhibited for what it said, which was in good form
	severed                    // it is not used again, although the answer is taken
)

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

func each(name string, worker func(*conn, received), unary, stream outcome) fault {
	return fault{name: name, worker: worker, unary: unary, stream: stream}
}

func both(name string, worker func(*conn, received), o outcome) fault {
	return each(name, worker, o, o)
}

func leaves(c connection, fl fault) fault { fl.after = c; return fl }

// stopped is a process that is stopped. Where it has begun a stream, only the end of the answer is
// told here: what it said before that is its own.
func stopped(when moment, unary, stream outcome) fault {
	name := map[moment]string{beforehand: "a process stopped before the request", midway: "a process stopped while it generates"}[when]
	return fault{name: name, stopped: when, unary: unary, stream: stream}
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
		each("reset in the middle", byMode(then(reset, half), then(reset, streamHead+chunk(hello))), lost("reset", "2xx"), broken(hello+brokenOff)),
		each("reset before the first event", byMode(then(reset, half), then(reset, streamHead+chunk(hello[:9]))), lost("reset", "2xx"), lost("reset", "2xx")),
		each("closed in the middle", byMode(then(hangUp, half), then(hangUp, streamHead+chunk(hello))), lost("reset", "2xx"), broken(hello+brokenOff)),
		leaves(kept, each("an end without [DONE]", streaming(hello), outcome{}, broken(hello+brokenOff))),
		each("an end without [DONE], but with all said", streaming(hello, ended), outcome{}, outcome{200, hello + ended + done, nil, "", "2xx", innocent}),
		each("frozen before the head", then(silent), late("", ""), late("timeout", "")),
		each("frozen in the head", then(silent, "HTTP/1.1 200 OK\r\nConte"), late("", ""), late("timeout", "")),
		each("frozen after the head", byMode(then(silent, half[:strings.Index(half, "{")]), then(silent, streamHead)), late("timeout", "2xx"), late("timeout", "2xx")),
		each("frozen in the middle", byMode(then(silent, half), then(silent, streamHead+chunk(hello))), late("timeout", "2xx"), broken(hello+lateWorkerEvent+done)),
		stopped(beforehand, late("", ""), late("timeout", "")),
		stopped(midway, late("", ""), outcome{200, lateWorkerEvent + done, nil, "", "2xx", inhibited}),
		both("garbage", then(silent, "SSH-2.0-x\r\n"), lost("protocol", "")),
		each("garbage for a chunk", byMode(
			then(silent, "HTTP/1.1 200 OK\r\n"+jsonHeader+"Transfer-Encoding: chunked\r\n\r\n"+chunk(reply[:9])+"zz\r\n"),
			then(silent, streamHead+chunk(hello)+"zz\r\n")), lost("protocol", "2xx"), broken(hello+brokenOff)),
		each("two lengths", byMode(
			then(silent, "HTTP/1.1 200 OK\r\n"+jsonHeader+"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
			then(silent, strings.Replace(streamHead, "\r\n\r\n", "\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 1)+chunk(hello))), lost("protocol", ""), lost("protocol", "")),
		leaves(severed, each("a length and chunks", byMode( // chunks count, and the connection is not used again
			then(silent, "HTTP/1.1 200 OK\r\n"+jsonHeader+"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(reply)+chunk("")),
			then(silent, strings.Replace(streamHead, "\r\n\r\n", "\r\nContent-Length: 5\r\n\r\n", 1)+chunk(helloStream)+chunk(""))),
			outcome{200, reply, nil, "", "2xx", innocent}, outcome{200, helloStream, nil, "", "2xx", innocent})),
		both("an oversized header", then(silent, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 1<<20)+"\r\n\r\n"), lost("protocol", "")),
		each("an oversized event", then(silent, streamHead, huge), outcome{}, lost("protocol", "2xx")),
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
		each("an error event first, 500", streaming(event(500), done), outcome{}, withCode(failing(500, "internal_server_error", failedMessage, ""), "2xx")),
		each("an error event first, 502", streaming(event(502), done), outcome{}, withCode(failing(502, "bad_gateway", failedMessage, "status"), "2xx")),
		each("an error event first, 503", streaming(event(503), done), outcome{}, withCode(failing(503, "service_unavailable", unavailableText, "status"), "2xx")),
		each("an error event first, 429", streaming(event(429), done), outcome{}, capacity("1", "2xx")),
		each("an error event first, 400", streaming(event(400), done), outcome{}, outcome{400, flat(400, "bad_request", "The worker refused the request"), nil, "", "2xx", innocent}),
		each("an error event later", streaming(hello, event(500), done), outcome{}, outcome{200, hello + event(500) + done, nil, "", "2xx", tripped}),
	}
}

func withCode(o outcome, code string) outcome { o.code = code; return o }

// TestFaults has every fault, for both kinds of request, with and without other workers. What has
// to follow is checked by endure. Rows run side by side, as most of them wait.
func TestFaults(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Run("row", func(t *testing.T) {
		for _, fl := range faults() {
			for _, o := range []ordeal{
				{fault: fl, outcome: fl.unary, mode: "unary", body: chatBody, good: reply},
				{fault: fl, outcome: fl.stream, mode: "stream", body: streamBody, good: helloStream},
			} {
				if o.status == 0 {
					continue
				}
				for _, n := range []int{1, 3} {
					t.Run(fmt.Sprintf("%s/%s/%d", fl.name, o.mode, n), func(t *testing.T) {
						t.Parallel()
						row := o
						row.n = n
						row.endure(t)
					})
				}
			}
		}
	})
	goleak.VerifyNone(t, before)
}
