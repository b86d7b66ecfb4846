package proxy

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"spillway/router"
	"spillway/worker"
)

// asked is an exchange of a client that sent these header lines, as net/http would hand it over.
func asked(lines ...string) *exchange {
	h := http.Header{}
	for _, l := range lines {
		name, value, _ := strings.Cut(l, ": ")
		h.Add(textproto.CanonicalMIMEHeaderKey(name), value)
	}
	return &exchange{
		s:   &Server{cfg: DefaultConfig()},
		req: &http.Request{Header: h, RemoteAddr: "192.0.2.7:4711", Host: "api.example"},
		id:  "req-1",
		sel: router.Selection{Worker: &worker.Worker{}},
	}
}

// sent are the lines of the head that a worker gets, sorted.
func sent(t *testing.T, x *exchange, attempt int) []string {
	t.Helper()
	head := string(x.appendHead(nil, attempt))
	if !strings.HasSuffix(head, "\r\n") {
		t.Fatalf("head %q does not end with a line end", head)
	}
	lines := strings.Split(strings.TrimSuffix(head, "\r\n"), "\r\n")
	slices.Sort(lines)
	return lines
}

// always are the lines that every worker gets of asked.
var always = []string{
	"Accept-Encoding: identity", "X-Forwarded-For: 192.0.2.7", "X-Forwarded-Host: api.example", "X-Forwarded-Proto: http", "X-Request-Id: req-1",
}

func TestHeadOfAWorker(t *testing.T) {
	for _, tt := range []struct {
		name  string
		lines []string
		with  func(*exchange)
		try   int
		want  []string // besides those of always
		not   []string // of those
	}{
		{name: "nothing"},
		{
			name:  "end-to-end headers",
			lines: []string{"Content-Type: application/json", "X-Custom: a", "x-custom: b", "Traceparent: 00-1-2-01", "tracestate: k=v", "Accept: text/event-stream", "Content-Encoding: identity"},
			want:  []string{"Content-Type: application/json", "X-Custom: a", "X-Custom: b", "Traceparent: 00-1-2-01", "Tracestate: k=v", "Accept: text/event-stream", "Content-Encoding: identity"},
		},
		{
			name: "hop-by-hop headers",
			lines: []string{
				"Connection: close", "Keep-Alive: timeout=5", "Proxy-Connection: keep-alive", "Proxy-Authenticate: Basic", "Proxy-Authorization: Basic x",
				"TE: trailers", "Trailer: X-T", "Transfer-Encoding: chunked", "Upgrade: h2c", "Alt-Svc: h3",
			},
		},
		{
			name:  "headers that Connection names",
			lines: []string{"Connection: keep-alive, x-one ,X-TWO", "connection: X-Three", "X-One: 1", "X-Two: 2", "X-Three: 3", "X-Four: 4"},
			want:  []string{"X-Four: 4"},
		},
		{
			name:  "Connection cannot name what Spillway adds",
			lines: []string{"Connection: x-request-id, x-forwarded-for, x-forwarded-host, accept-encoding, x-data-parallel-rank", "X-Forwarded-For: 203.0.113.9"},
			with:  func(x *exchange) { x.sel.MultiRank = true },
			want:  []string{"X-Data-Parallel-Rank: 0"},
		},
		{name: "Connection names Authorization", lines: []string{"Connection: authorization", "Authorization: Bearer c"}},
		{name: "made anew", lines: []string{"Host: evil", "Content-Length: 99", "Accept-Encoding: gzip", "Expect: 100-continue", "X-Request-Id: mine", "X-Forwarded-Proto: https", "X-Forwarded-Host: evil"}},
		{name: "Authorization", lines: []string{"Authorization: Bearer c"}, want: []string{"Authorization: Bearer c"}},
		{name: "Authorization kept back", lines: []string{"Authorization: Bearer c"}, with: func(x *exchange) { x.s.cfg.ForwardAuth = new(false) }},
		{
			name: "the worker's own key", lines: []string{"Authorization: Bearer c"},
			with: func(x *exchange) { x.sel.Worker.APIKey = "k" }, want: []string{"Authorization: Bearer k"},
		},
		{name: "a further attempt", try: 2, want: []string{"X-Request-Id: req-1-r2"}, not: []string{"X-Request-Id: req-1"}},
		{
			name: "TLS", with: func(x *exchange) { x.req.TLS = &tls.ConnectionState{} },
			want: []string{"X-Forwarded-Proto: https"}, not: []string{"X-Forwarded-Proto: http"},
		},
		{
			name: "forwarded before", lines: []string{"X-Forwarded-For: 203.0.113.9, 10.0.0.1", "X-Forwarded-For: ", "X-Forwarded-For: 10.0.0.2"},
			want: []string{"X-Forwarded-For: 203.0.113.9, 10.0.0.1, 10.0.0.2, 192.0.2.7"}, not: []string{"X-Forwarded-For: 192.0.2.7"},
		},
		{
			name: "an IPv6 client", with: func(x *exchange) { x.req.RemoteAddr = "[2001:db8::1]:80" },
			want: []string{"X-Forwarded-For: 2001:db8::1"}, not: []string{"X-Forwarded-For: 192.0.2.7"},
		},
		{name: "a rank that the client wants of a worker with one", lines: []string{"X-Data-Parallel-Rank: 3"}},
		{
			name: "the rank that was selected", lines: []string{"x-DATA-parallel-RANK: 3", "X-dp-rank: 3"},
			with: func(x *exchange) { x.sel.MultiRank = true; x.sel.Rank.DP = 5 }, want: []string{"X-Data-Parallel-Rank: 5"},
		},
		{name: "metadata", lines: []string{"X-Dynamo-Meta-Policy-Class: a", "x-dynamo-META-k: v"}},
		{
			name: "metadata by another prefix", lines: []string{"X-Dynamo-Meta-K: v", "X-My-K: v"},
			with: func(x *exchange) { x.s.cfg.MetadataHeader = "X-My-" }, want: []string{"X-Dynamo-Meta-K: v"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := asked(tt.lines...)
			if tt.with != nil {
				tt.with(x)
			}
			want := append(slices.DeleteFunc(slices.Clone(always), func(l string) bool { return slices.Contains(tt.not, l) }), tt.want...)
			slices.Sort(want)
			if got := sent(t, x, tt.try); !slices.Equal(got, want) {
				t.Errorf("head for the worker\n got %q\nwant %q", got, want)
			}
		})
	}
}

// controls are all headers by which a client speaks to Spillway.
var controls = []string{
	"x-dynamo-request-id", "x-dynamo-worker-instance-id", "x-worker-instance-id", "x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank",
	"x-dynamo-prefill-instance-id", "x-prefill-instance-id", "x-dynamo-prefill-dp-rank", "x-prefill-dp-rank",
	"x-dynamo-request-priority", "x-dynamo-request-strict-priority", "x-tenant-id", "x-dynamo-session-id", "x-session-id",
	"x-claude-code-session-id", "thread-id", "x-dynamo-meta-a", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms",
	"x-llm-d-inference-objective", "x-gateway-inference-objective", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id",
	"x-smg-priority", "x-request-timeout-ms", "X-Spillway-Lane",
}

func TestControlHeadersNeverReachAWorker(t *testing.T) {
	for _, name := range controls {
		for _, spelled := range []string{name, strings.ToUpper(name), textproto.CanonicalMIMEHeaderKey(name)} {
			if got := sent(t, asked(spelled+": 1"), 0); !slices.Equal(got, always) {
				t.Errorf("%s: the worker gets %q", spelled, got)
			}
		}
	}
}

func TestRequestID(t *testing.T) {
	const id = "0188f5a2-7c1d-4c4e-8d6f-0123456789ab"
	for _, tt := range []struct {
		name  string
		lines []string
		want  string // "" is a new UUIDv4
	}{
		{"none", nil, ""},
		{"one", []string{"X-Request-Id: abc-1"}, "abc-1"},
		{"any visible characters", []string{`x-request-id: !"#~{}`}, `!"#~{}`},
		{"128 characters", []string{"X-Request-Id: " + strings.Repeat("x", 128)}, strings.Repeat("x", 128)},
		{"129 characters", []string{"X-Request-Id: " + strings.Repeat("x", 129)}, ""},
		{"a space", []string{"X-Request-Id: a b"}, ""},
		{"a tab", []string{"X-Request-Id: a\tb"}, ""},
		{"DEL", []string{"X-Request-Id: a\x7f"}, ""},
		{"not ASCII", []string{"X-Request-Id: é"}, ""},
		{"empty", []string{"X-Request-Id: "}, ""},
		{"the older name", []string{"X-Dynamo-Request-Id: " + id}, id},
		{"the older name in capitals", []string{"X-Dynamo-Request-Id: " + strings.ToUpper(id)}, id},
		{"the older name with no UUID", []string{"X-Dynamo-Request-Id: abc"}, ""},
		{"the older name with a UUID in another form", []string{"X-Dynamo-Request-Id: {" + id + "}"}, ""},
		{"both", []string{"X-Request-Id: a", "X-Dynamo-Request-Id: " + id}, "a"},
		{"both, the first of no use", []string{"X-Request-Id: a b", "X-Dynamo-Request-Id: " + id}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := requestID(asked(tt.lines...).req.Header)
			if tt.want != "" && got != tt.want {
				t.Errorf("requestID() = %q, want %q", got, tt.want)
			}
			if u, err := uuid.Parse(got); tt.want == "" && (err != nil || u.Version() != 4 || got == id) {
				t.Errorf("requestID() = %q, want a new UUIDv4", got)
			}
		})
	}
}

func TestReadHints(t *testing.T) {
	const w, rank = "X-Dynamo-Worker-Instance-Id: ", "X-Dynamo-Dp-Rank: "
	for _, tt := range []struct {
		name  string
		lines []string
		want  string // worker, rank, tenant
	}{
		{"none", nil, "- - "},
		{"all", []string{w + "7", rank + "3", "x-tenant-id: t"}, "7 3 t"},
		{"aliases", []string{"X-Worker-Instance-Id: 7", "X-Dp-Rank: 3"}, "7 3 "},
		{"the last alias of the rank", []string{"X-Data-Parallel-Rank: 3"}, "- 3 "},
		{"the canonical name wins", []string{"X-Worker-Instance-Id: 8", w + "7", "X-Data-Parallel-Rank: 5", "X-Dp-Rank: 4", rank + "3"}, "7 3 "},
		{"the first alias wins", []string{"X-Data-Parallel-Rank: 5", "X-Dp-Rank: 4"}, "- 4 "},
		{"and wins with a value of no use", []string{"X-Worker-Instance-Id: 8", w, "X-Dp-Rank: 4", rank + "x"}, "- - "},
		{"a worker's name", []string{w + "gpu-1"}, "gpu-1 - "},
		{"white space around a rank", []string{rank + " 3 "}, "- 3 "},
		{"rank 0", []string{rank + "0"}, "- 0 "},
		{"the largest rank", []string{rank + "4294967294"}, "- 4294967294 "},
		{"the rank that means unset", []string{rank + "4294967295"}, "- - "},
		{"a rank out of range", []string{rank + "4294967296"}, "- - "},
		{"a rank below 0", []string{rank + "-1"}, "- - "},
		{"a rank with a sign", []string{rank + "+1"}, "- - "},
		{"an empty tenant", []string{"x-tenant-id: "}, "- - "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := spell(readHints(asked(tt.lines...).req.Header, false)); got != tt.want {
				t.Errorf("readHints() = %q, want %q", got, tt.want)
			}
		})
	}
	if got := spell(readHints(asked(w+"7", rank+"3").req.Header, true)); got != "- - " {
		t.Errorf("readHints() = %q, though hints are disabled", got)
	}
}

func spell(h hints) string {
	worker, dp := "-", "-"
	if h.worker != "" {
		worker = h.worker
	}
	if h.dp != nil {
		dp = fmt.Sprint(*h.dp)
	}
	return worker + " " + dp + " " + h.tenant
}

func TestMetadataBounds(t *testing.T) {
	many := func(n, bytes int) (lines []string) {
		for i := range n {
			name := fmt.Sprintf("X-Dynamo-Meta-%02d", i)
			lines = append(lines, name+": "+strings.Repeat("v", bytes-len(name)))
		}
		return lines
	}
	same := slices.Repeat([]string{"X-Dynamo-Meta-A: 1"}, 65)
	for _, tt := range []struct {
		name    string
		lines   []string
		refused bool
	}{
		{"64 headers", many(64, 100), false},
		{"65 headers", many(65, 100), true},
		{"65 lines of one name", same, true},
		{"64 KiB", many(64, 1<<10), false},
		{"one byte more", append(many(63, 1<<10), many(64, 1<<10+1)[63]), true},
		{"other headers do not count", append(many(64, 1<<10), "X-Other: "+strings.Repeat("v", 1<<17)), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bad := asked(tt.lines...).checkMetadata()
			if (bad != nil) != tt.refused {
				t.Fatalf("checkMetadata() = %v, want a refusal: %v", bad, tt.refused)
			}
			if bad != nil && (bad.Status != 431 || bad.Type() != "request_header_fields_too_large" || bad.Cause != "validation") {
				t.Errorf("checkMetadata() = %+v of type %s", bad, bad.Type())
			}
		})
	}
}

func TestJSONContent(t *testing.T) {
	for _, tt := range []struct {
		value string
		want  bool
	}{
		{"application/json", true}, {"Application/JSON", true}, {"application/json; charset=utf-8", true}, {"application/json;charset=latin1", true},
		{" application/json ", true}, {"application/problem+json", true}, {"application/vnd.api+JSON ; v=1", true},
		{"", false}, {"application/+json", false}, {"application/jsonl", false}, {"application/json-seq", false}, {"text/json", false},
		{"application/x-www-form-urlencoded", false}, {"multipart/form-data; boundary=application/json", false}, {"json", false}, {"application/xml+json+xml", false},
	} {
		if got := jsonContent(tt.value); got != tt.want {
			t.Errorf("jsonContent(%q) = %v, want %v", tt.value, got, tt.want)
		}
	}
}
