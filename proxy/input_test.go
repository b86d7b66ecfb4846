package proxy_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"spillway/proxy"
)

// refused are the headers of an answer to a request that was not understood.
var refused = []string{"Content-Type: application/json", "X-Spillway-Reason: ", "Retry-After: ", "X-Spillway-Worker: "}

func invalid(message string) string { return flat(400, "bad_request", "Validation: "+message) }

// TestBadInput goes through the steps of a request in their documented order; rows that break
// two rules show which is told.
func TestBadInput(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{models: []string{"empty"}}, served("w", s), served("v", s, "other"))
	var metadata []string
	for i := range 65 {
		metadata = append(metadata, fmt.Sprintf("X-Dynamo-Meta-%d: v", i))
	}
	const (
		type415 = "Content-Type must be application/json"
		enc415  = "Content-Encoding must be identity"
		meta431 = "Request metadata exceeds 64 headers or 64 KiB"
	)
	for _, tt := range []struct {
		name    string
		path    string
		body    string
		headers []string
		status  int
		want    string
	}{
		{"no content type", "chat/completions", chatBody, []string{"Content-Type: "}, 415, flat(415, "unsupported_media_type", type415)},
		{"form content type", "chat/completions", chatBody, []string{"Content-Type: application/x-www-form-urlencoded"}, 415, flat(415, "unsupported_media_type", type415)},
		{"text/json", "chat/completions", chatBody, []string{"Content-Type: text/json"}, 415, flat(415, "unsupported_media_type", type415)},
		{"gzip", "chat/completions", chatBody, []string{"Content-Encoding: gzip"}, 415, flat(415, "unsupported_media_type", enc415)},
		{"wrong type comes before malformed JSON", "chat/completions", "{", []string{"Content-Type: text/plain"}, 415, flat(415, "unsupported_media_type", type415)},
		{"65 metadata headers", "chat/completions", chatBody, metadata, 431, flat(431, "request_header_fields_too_large", meta431)},
		{"metadata of 64 KiB", "chat/completions", chatBody, []string{"X-Dynamo-Meta-A: " + strings.Repeat("v", 64<<10)}, 431, flat(431, "request_header_fields_too_large", meta431)},
		{"empty body", "chat/completions", "", []string{"Content-Type: application/json"}, 400, invalid("the request body is not valid JSON (near byte 0)")},
		{"half an object", "chat/completions", "{", nil, 400, invalid("the request body is not valid JSON (near byte 1)")},
		{"trailing garbage", "chat/completions", chatBody + "}", nil, 400, invalid(fmt.Sprintf("the request body is not valid JSON (near byte %d)", len(chatBody)))},
		{"an array", "chat/completions", "[]", nil, 400, invalid("the request body must be a JSON object")},
		{"no model, though there are several", "chat/completions", `{"messages":[{}]}`, nil, 400, invalid("model is required")},
		{"model null", "chat/completions", `{"model":null,"messages":[{}]}`, nil, 400, invalid("model is required")},
		{"model not a string", "chat/completions", `{"model":1,"messages":[{}]}`, nil, 400, invalid("model must be a string")},
		{"model empty", "chat/completions", `{"model":"","messages":[{}]}`, nil, 400, invalid("model must not be empty")},
		{"no messages", "chat/completions", `{"model":"m"}`, nil, 400, invalid("messages is required")},
		{"no prompt", "completions", `{"model":"m"}`, nil, 400, invalid("prompt is required")},
		{"no input", "embeddings", `{"model":"m"}`, nil, 400, invalid("input is required")},
		{"stream not a boolean", "completions", `{"model":"m","prompt":"x","stream":1}`, nil, 400, invalid("stream must be a boolean")},
		{"stream_options without stream", "completions", `{"model":"m","prompt":"x","stream_options":{}}`, nil, 400, invalid("stream_options is only allowed when stream is true")},
		{"n too large", "completions", `{"model":"m","prompt":"x","n":129}`, nil, 400, invalid("n must be an integer from 1 to 128")},
		{"a bad field comes before an unknown model", "chat/completions", `{"model":"nope"}`, nil, 400, invalid("messages is required")},
		{"a bad field comes before no workers", "chat/completions", `{"model":"empty"}`, nil, 400, invalid("messages is required")},
		{"unknown model", "chat/completions", `{"model":"nope","messages":[{}]}`, nil, 404, flat(404, "not_found", "Model not found: nope")},
		{"unknown model for completions", "completions", `{"model":"nope","prompt":"x"}`, nil, 404, flat(404, "not_found", "Model not found: nope")},
		{"unknown model for embeddings", "embeddings", `{"model":"nope","input":"x"}`, nil, 404, flat(404, "not_found", "Model not found: nope")},
		{"pinned to a stranger", "chat/completions", chatBody, []string{"X-Worker-Instance-Id: 12345"}, 400, invalid("the pinned worker or rank does not serve the model")},
		{"pinned to another model's worker", "chat/completions", chatBody, []string{"X-Dynamo-Worker-Instance-Id: v"}, 400, invalid("the pinned worker or rank does not serve the model")},
		{"pinned to a name of nobody", "chat/completions", chatBody, []string{"X-Dynamo-Worker-Instance-Id: w9"}, 400, invalid("the pinned worker does not serve the model")},
		{"pinned to a rank of nobody", "chat/completions", chatBody, []string{"X-Dp-Rank: 3"}, 400, invalid("the pinned worker or rank does not serve the model")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.send("POST", "/v1/"+tt.path, tt.body, tt.headers...).is(t, tt.body, tt.status, tt.want, refused...)
		})
	}
	if n := len(s.seen()); n > 0 {
		t.Errorf("%d requests reached a worker, want none", n)
	}
	for _, series := range []string{`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`, `dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`} {
		if got := f.metric(series); got != "0" {
			t.Errorf("%s = %s after bad input alone, want 0", series, got)
		}
	}
}

// TestAcceptedInput has what looks odd but is no error.
func TestAcceptedInput(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{}, served("w", s))
	for _, tt := range []struct {
		name, body string
		headers    []string
	}{
		{"the only model need not be named", `{"messages":[{"role":"user","content":"Hi"}]}`, nil},
		{"parameters and case of the content type", chatBody, []string{"Content-Type: Application/JSON; charset=utf-8"}},
		{"structured suffix", chatBody, []string{"Content-Type: application/vnd.api+json"}},
		{"identity", chatBody, []string{"Content-Encoding: Identity"}},
		{"64 KiB less a little of metadata", chatBody, []string{"X-Dynamo-Meta-A: " + strings.Repeat("v", 60<<10)}},
		{"unparsable hint", chatBody, []string{"X-Dp-Rank: first"}},
	} {
		f.chat(tt.body, tt.headers...).is(t, tt.name, 200, reply)
		seen := s.seen()
		if last := seen[len(seen)-1]; last.body != tt.body || last.header.Get("X-Dynamo-Meta-A") != "" {
			t.Errorf("%s: the worker got %.200q, want the body unchanged and no metadata", tt.name, last.body)
		}
	}
}

const tooLarge = `{"message":"Request body exceeds the limit of 45 MiB (body-limit-mb)","type":"payload_too_large","code":413}`

// spaces is a body of white space of a given length.
type spaces struct{ left int }

func (s *spaces) Read(p []byte) (int, error) {
	n := min(len(p), s.left)
	if n == 0 {
		return 0, io.EOF
	}
	for i := range p[:n] {
		p[i] = ' '
	}
	s.left -= n
	return n, nil
}

func TestLargeBodies(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{}, served("w", s))
	small := begin(t, setup{proxy: func(c *proxy.Config) { c.BodyLimitMB = 1 }}, served("w", s))
	send := func(f *front, size int, declared bool) got {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/chat/completions",
			io.MultiReader(strings.NewReader(chatBody), &spaces{size - len(chatBody)}))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if declared {
			req.ContentLength = int64(size)
		}
		return f.do(req)
	}
	headers := []string{"Content-Type: application/json", "X-Spillway-Reason: "}
	send(f, 46<<20, true).is(t, "46 MiB declared", 413, tooLarge, headers...)
	send(f, 46<<20, false).is(t, "46 MiB chunked", 413, tooLarge, headers...)
	one := strings.Replace(tooLarge, "45", "1", 1)
	send(small, 1<<20+1, true).is(t, "1 MiB and a byte declared", 413, one, headers...)
	send(small, 1<<20+1, false).is(t, "1 MiB and a byte chunked", 413, one, headers...)
	send(small, 1<<20, true).is(t, "1 MiB declared", 200, reply)
	send(small, 1<<20, false).is(t, "1 MiB chunked", 200, reply)
	if seen := s.seen(); len(seen) != 2 || len(seen[0].body) != 1<<20 || !strings.HasPrefix(seen[1].body, chatBody) {
		t.Errorf("the worker got %d requests, want the two that are within the limit, whole", len(seen))
	}

	// A client that waits to be told to go on is spared the upload.
	c := f.dial()
	_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 48234496\r\n\r\n")
	if status, header := c.head(); status != "HTTP/1.1 413 Request Entity Too Large" || !strings.Contains(header, "Connection: close\r\n") {
		t.Errorf("46 MiB announced with Expect = %q %q, want 413 and a close", status, header)
	}
}

func TestBodyCutShort(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{}, served("w", s))
	for name, request := range map[string]string{
		"by length":       "Content-Length: 100\r\n\r\n" + chatBody[:20],
		"in a chunk":      "Transfer-Encoding: chunked\r\n\r\n40\r\n" + chatBody[:20],
		"between chunks":  "Transfer-Encoding: chunked\r\n\r\n" + chunk(chatBody),
		"by a bad length": "Transfer-Encoding: chunked\r\n\r\n" + chunk(chatBody) + "zz\r\n",
	} {
		c := f.dial()
		_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+request)
		if err := c.Conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		status, header := c.head()
		body, _ := io.ReadAll(c.br)
		want := flat(400, "bad_request", "The request body could not be read")
		if status != "HTTP/1.1 400 Bad Request" || string(body) != want || !strings.Contains(header, "Connection: close\r\n") {
			t.Errorf("body cut %s = %q %q %q\nwant 400 %s and a close", name, status, header, body, want)
		}
	}
	if n := len(s.seen()); n > 0 {
		t.Errorf("%d requests reached the worker, want none", n)
	}
}

// TestIdleUpload checks that a client which stops sending does not hold its request for ever.
func TestIdleUpload(t *testing.T) {
	f := begin(t, setup{models: []string{"m"}, proxy: func(c *proxy.Config) { c.ClientReadTimeout = 1 }})
	c := f.dial()
	_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n")
	if status, _ := c.head(); status != "HTTP/1.1 400 Bad Request" {
		t.Errorf("a body that never comes = %q, want 400", status)
	}
}

// TestForwardedBytes checks that a worker gets the bytes that the client sent.
func TestForwardedBytes(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{}, served("w", s))
	odd := "\n{ \"model\" : \"\\u006d\",\"seed\":123456789012345678901234567890, \"messages\":[{\"content\":\"\u00e9\\ud83d\\ude00\"}],\"seed\":1e400}\r\n"
	f.chat(odd).is(t, "odd spelling", 200, reply)
	big := chatBody[:len(chatBody)-1] + `,"x":"` + string(bytes.Repeat([]byte("y"), 1<<20)) + `"}`
	f.chat(big).is(t, "1 MiB", 200, reply)
	if seen := s.seen(); seen[0].body != odd || seen[1].body != big {
		t.Errorf("the worker got %.100q and %d bytes, want what was sent", seen[0].body, len(seen[1].body))
	}
}
