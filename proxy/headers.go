package proxy

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"spillway/httperr"
	"spillway/upstream"
)

// dropped are the request headers that are not passed on as they are: hop-by-hop ones, those that
// are made anew for the worker, and those by which clients speak to Spillway.
var dropped = set(
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Alt-Svc",
	"Host", "Content-Length", "Accept-Encoding", "Expect", "Authorization", "X-Api-Key", "X-Request-Id",
	"X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host",
	"X-Dynamo-Request-Id", "X-Dynamo-Worker-Instance-Id", "X-Worker-Instance-Id",
	"X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank",
	"X-Dynamo-Prefill-Instance-Id", "X-Prefill-Instance-Id", "X-Dynamo-Prefill-Dp-Rank", "X-Prefill-Dp-Rank",
	"X-Dynamo-Request-Priority", "X-Dynamo-Request-Strict-Priority", "X-Tenant-Id",
	"X-Dynamo-Session-Id", "X-Session-Id", "X-Claude-Code-Session-Id", "Thread-Id",
	"X-Llm-D-Slo-Ttft-Ms", "X-Slo-Ttft-Ms", "X-Llm-D-Slo-Tpot-Ms", "X-Slo-Tpot-Ms",
	"X-Llm-D-Inference-Objective", "X-Gateway-Inference-Objective",
	"X-Llm-D-Inference-Fairness-Id", "X-Gateway-Inference-Fairness-Id",
	"X-Smg-Priority", "X-Request-Timeout-Ms", "X-Spillway-Lane",
)

// credentials are the headers in which clients say who they are.
var credentials = [...]string{"Authorization", "X-Api-Key"}

// keptBack are the response headers that are not passed on to the client.
var keptBack = set(
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Alt-Svc", "Server", "Date", "Content-Length",
	"X-Request-Id", "Retry-After",
)

func set(names ...string) map[string]bool {
	m := make(map[string]bool, len(names))
	for _, n := range names {
		m[n] = true
	}
	return m
}

// appendHead appends the header lines for the worker: those of the client, less what it must not
// decide, and those that Spillway adds.
func (x *exchange) appendHead(dst []byte, attempt int) []byte {
	h := x.req.Header
	named := h["Connection"] // headers that the client declared hop-by-hop; hardly ever any
	for name, values := range h {
		if dropped[name] || x.isMetadata(name) || len(named) > 0 && listed(named, name) {
			continue
		}
		for _, v := range values {
			dst = upstream.AppendHeader(dst, name, v)
		}
	}
	dst = append(dst, "Accept-Encoding: identity\r\n"...)
	if key := x.sel.Worker.APIKey; key != "" {
		dst = upstream.AppendHeader(dst, "Authorization", "Bearer "+key)
	} else if x.s.cfg.forwardsAuth() {
		for _, name := range credentials {
			for _, v := range h[name] {
				if !listed(named, name) {
					dst = upstream.AppendHeader(dst, name, v)
				}
			}
		}
	}
	dst = x.appendForwarded(dst, h, named)
	dst = append(dst, "X-Request-Id: "...)
	dst = append(dst, x.id...)
	if attempt > 0 { // two live requests with one ID would collide in an engine
		dst = append(dst, "-r"...)
		dst = strconv.AppendInt(dst, int64(attempt), 10)
	}
	dst = append(dst, "\r\n"...)
	if x.sel.MultiRank {
		dst = append(dst, "X-Data-Parallel-Rank: "...)
		dst = strconv.AppendUint(dst, uint64(x.sel.Rank.DP), 10)
		dst = append(dst, "\r\n"...)
	}
	return dst
}

func (x *exchange) appendForwarded(dst []byte, h http.Header, named []string) []byte {
	client, _, err := net.SplitHostPort(x.req.RemoteAddr)
	if err != nil {
		client = x.req.RemoteAddr
	}
	dst = append(dst, "X-Forwarded-For: "...)
	for _, v := range h["X-Forwarded-For"] {
		if v != "" && !listed(named, "X-Forwarded-For") {
			dst = append(append(dst, v...), ", "...) // net/http has refused values with line ends
		}
	}
	dst = append(append(dst, client...), "\r\nX-Forwarded-Proto: "...)
	if x.req.TLS != nil {
		dst = append(dst, "https\r\n"...)
	} else {
		dst = append(dst, "http\r\n"...)
	}
	return upstream.AppendHeader(dst, "X-Forwarded-Host", x.req.Host)
}

// listed tells whether a name stands in comma-separated header values.
func listed(values []string, name string) bool {
	for _, v := range values {
		for part := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(part), name) {
				return true
			}
		}
	}
	return false
}

// requestID is the client's correlation ID if it is fit to be one, else a new UUIDv4. The older
// header is only read if the other one is not there at all.
func requestID(h http.Header) string {
	if v := h["X-Request-Id"]; len(v) > 0 {
		if id := v[0]; id != "" && len(id) <= 128 && visible(id) {
			return id
		}
	} else if id := first(h, "X-Dynamo-Request-Id"); len(id) == 36 {
		if u, err := uuid.Parse(id); err == nil {
			return u.String()
		}
	}
	return newRequestID()
}

// newRequestID makes a UUID of version 4. It need not be a secret, so the runtime's own random
// numbers, which cost no system call, will do.
func newRequestID() string {
	var u uuid.UUID
	binary.LittleEndian.PutUint64(u[:8], rand.Uint64())
	binary.LittleEndian.PutUint64(u[8:], rand.Uint64())
	u[6] = u[6]&0x0f | 0x40 // version 4
	u[8] = u[8]&0x3f | 0x80 // variant of RFC 9562
	return u.String()
}

func first(h http.Header, canonical string) string {
	if v := h[canonical]; len(v) > 0 {
		return v[0]
	}
	return ""
}

func visible(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// jsonContent tells whether a Content-Type is application/json or application/anything+json.
func jsonContent(v string) bool {
	if v == "application/json" {
		return true
	}
	v, _, _ = strings.Cut(v, ";")
	v = strings.ToLower(strings.TrimSpace(v))
	sub, ok := strings.CutPrefix(v, "application/")
	return ok && (sub == "json" || strings.HasSuffix(sub, "+json") && len(sub) > len("+json"))
}

// The bounds of metadata headers.
const (
	maxMetadata      = 64
	maxMetadataBytes = 64 << 10
)

func (x *exchange) isMetadata(name string) bool {
	p := x.s.cfg.MetadataHeader
	return len(name) > len(p) && p != "" && strings.EqualFold(name[:len(p)], p)
}

// checkMetadata refuses more metadata than is worth keeping.
func (x *exchange) checkMetadata() *httperr.Error {
	count, size := 0, 0
	for name, values := range x.req.Header {
		if !x.isMetadata(name) {
			continue
		}
		for _, v := range values {
			count++
			size += len(name) + len(v)
		}
	}
	if count > maxMetadata || size > maxMetadataBytes {
		return httperr.New(http.StatusRequestHeaderFieldsTooLarge,
			"Request metadata exceeds 64 headers or 64 KiB")
	}
	return nil
}

// hints are what a client asks of routing.
type hints struct {
	worker  string // instance ID or name, "" if any will do
	dp      *uint32
	tenant  string
	session string
}

// readHints reads the routing headers. The canonical name wins over its aliases even if its value
// is of no use; such a value is no hint.
func readHints(h http.Header, disabled bool) hints {
	t := hints{tenant: first(h, "X-Tenant-Id")}
	if disabled {
		return t
	}
	if v, ok := either(h, "X-Dynamo-Worker-Instance-Id", "X-Worker-Instance-Id"); ok {
		t.worker = v
	}
	if v, ok := either(h, "X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank"); ok {
		if n, err := strconv.ParseUint(strings.TrimSpace(v), 10, 32); err == nil && n != 1<<32-1 {
			t.dp = new(uint32(n))
		}
	}
	t.session, _ = either(h, "X-Dynamo-Session-Id", "X-Session-Id", "X-Claude-Code-Session-Id", "Thread-Id")
	return t
}

func either(h http.Header, names ...string) (string, bool) {
	for _, name := range names {
		if v := h[name]; len(v) > 0 {
			return v[0], true
		}
	}
	return "", false
}
