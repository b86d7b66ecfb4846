package dispatch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"spillway/dispatch/budget"
)

// newClient is the client of gateways, with room for a connection of each worker.
func newClient(cfg Config, workers int) (*http.Client, error) {
	conf, err := tlsConfig(cfg.TLSCA, cfg.TLSCert, cfg.TLSKey, cfg.TLSInsecure, true)
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, TLSClientConfig: conf, ForceAttemptHTTP2: true,
			MaxIdleConns: workers, MaxIdleConnsPerHost: workers, IdleConnTimeout: 90 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// notForwarded are headers that a producer must not set.
var notForwarded = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Proxy-Authenticate": true, "Proxy-Authorization": true,
	"Te": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true, "Host": true, "Content-Length": true,
	"Accept-Encoding": true, "X-Spillway-Lane": true,
}

// body is what is sent of a message: its payload as it came, but for stream and transforms.
func (d *Dispatcher) body(m *message) (body []byte, contentType string, err error) {
	body, contentType = m.payload, "application/json"
	if len(d.transform) == 0 && !mayStream(m.payload) {
		return body, contentType, nil
	}
	fields, err := members(m.payload)
	if err != nil {
		return nil, "", fmt.Errorf("payload: %w", err)
	}
	if at := find(fields, "stream"); at >= 0 && string(fields[at].value) == "true" {
		switch d.cfg.StreamPolicy {
		case "reject":
			return nil, "", errors.New("stream is true, and answers are not streamed here")
		case "force_off":
			kept := fields[:0:0]
			for _, f := range fields {
				if f.key != "stream_options" && f.key != "stream" {
					kept = append(kept, f)
				}
			}
			body = encode(append(kept, member{"stream", []byte("false")}))
		}
	}
	for _, t := range d.transform {
		if err := t.validate(m, fields); err != nil {
			return nil, "", err
		}
	}
	for _, t := range d.transform {
		if changed, kind, ok, err := t.transform(m, fields); ok || err != nil {
			return changed, kind, err
		}
	}
	return body, contentType, nil
}

// mayStream tells whether a payload may have a field stream. Its name can be spelled with escapes.
func mayStream(payload []byte) bool {
	return bytes.Contains(payload, []byte(`"stream"`)) || bytes.Contains(payload, []byte(`\u00`))
}

// weigh is what a message weighs in its group's unit.
func (d *Dispatcher) weigh(q *Queue, m *message) (int64, error) {
	switch q.group.budget.Unit() {
	case budget.Tokens:
		return tokens(m.payload, q.group.inputs[0].output), nil
	case budget.Bytes:
		body, _, err := d.body(m)
		return int64(len(body)), err
	}
	return 1, nil
}

// tokens estimates what a request takes: a token for four bytes of its prompt, and what it may
// generate, for each of n choices. unsaid counts where it sets no limit.
func tokens(payload []byte, unsaid int64) int64 {
	var p struct {
		Prompt, Messages, Input json.RawMessage
		Completion              *float64 `json:"max_completion_tokens"`
		Max                     *float64 `json:"max_tokens"`
		Output                  *float64 `json:"max_output_tokens"`
		N                       *float64 `json:"n"`
	}
	_ = json.Unmarshal(payload, &p) // what is of another kind counts as not given
	prompt := (len(p.Prompt) + len(p.Messages) + len(p.Input) + 3) / 4
	output, n := float64(unsaid), 1.0
	for _, v := range []*float64{p.Output, p.Max, p.Completion} {
		if v != nil && *v >= 0 {
			output = *v
		}
	}
	if p.N != nil && *p.N > 1 {
		n = *p.N
	}
	return int64(prompt) + int64(math.Min(output*n, 1<<50))
}

// request makes the HTTP request of a message.
func (d *Dispatcher) request(m *message, q *Queue, g *grant) (*http.Request, error) {
	body, contentType, err := d.body(m)
	if err != nil {
		return nil, err
	}
	path := q.Path
	if m.endpoint != "" {
		path = m.endpoint
	}
	u := *q.base
	u.RawQuery = ""
	target, err := u.Parse(strings.TrimRight(u.Path, "/") + path)
	if err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	req, err := http.NewRequest(http.MethodPost, target.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.GetBody = nil // nothing is sent twice behind our back
	h := req.Header
	h.Set("Content-Type", contentType)
	if q.Objective != "" {
		h.Set("X-Gateway-Inference-Objective", q.Objective)
		h.Set("X-Llm-D-Inference-Objective", q.Objective)
	}
	for name, value := range m.headers {
		name = textproto.CanonicalMIMEHeaderKey(name)
		if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return nil, fmt.Errorf("header %q cannot be sent", name)
		}
		if !notForwarded[name] && (name != "Content-Type" || contentType == "application/json") {
			h.Set(name, value)
		}
	}
	if q.apiKey != "" && h.Get("Authorization") == "" && target.Host == q.base.Host {
		h.Set("Authorization", "Bearer "+q.apiKey)
	}
	d.merge.stamp(h, m, g)
	for name, value := range map[string]string{"Idempotency-Key": m.id + ":" + m.token, "X-Request-Id": m.id} {
		if h.Get(name) == "" && httpguts.ValidHeaderFieldValue(value) {
			h.Set(name, value)
		}
	}
	for _, name := range []string{"traceparent", "tracestate", "baggage"} {
		if v := m.metadata[name]; v != "" && h.Get(name) == "" && httpguts.ValidHeaderFieldValue(v) {
			h.Set(name, v)
		}
	}
	h.Set("X-Spillway-Lane", "batch")
	return req, nil
}

func statusLabel(status int) string { return strconv.Itoa(status) }
