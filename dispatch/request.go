package dispatch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"

	"golang.org/x/net/http/httpguts"

	"spillway/dispatch/budget"
)

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

// line is a header of a request, its name in canonical form.
type line struct{ name, value string }

// lines are the headers of a request, each name once.
type lines []line

func (l lines) has(name string) bool {
	return slices.ContainsFunc(l, func(o line) bool { return o.name == name })
}

func (l *lines) set(name, value string) {
	for i := range *l {
		if (*l)[i].name == name {
			(*l)[i].value = value
			return
		}
	}
	*l = append(*l, line{name, value})
}

// compose makes the HTTP request of a message.
func (d *Dispatcher) compose(p *post, m *message, q *Queue, g *grant) (err error) {
	var contentType string
	if p.body, contentType, err = d.body(m); err != nil {
		return err
	}
	p.path = q.uri
	if m.endpoint != "" {
		u, err := url.Parse(m.endpoint) // checkEndpoint has let it pass: it names no host
		if err != nil {
			return fmt.Errorf("endpoint: %w", err)
		}
		p.path = u.RequestURI()
	}
	l := append(p.lines[:0], line{"Content-Type", contentType}, line{"User-Agent", "spillway"}, line{"Accept-Encoding", "identity"})
	if q.Objective != "" {
		l.set("X-Gateway-Inference-Objective", q.Objective)
		l.set("X-Llm-D-Inference-Objective", q.Objective)
	}
	for name, value := range m.headers {
		name = textproto.CanonicalMIMEHeaderKey(name)
		if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return fmt.Errorf("header %q cannot be sent", name)
		}
		if !notForwarded[name] && (name != "Content-Type" || contentType == "application/json") {
			l.set(name, value)
		}
	}
	if q.gateway.authorization != "" && !l.has("Authorization") {
		l.set("Authorization", q.gateway.authorization)
	}
	d.merge.stamp(&l, m, g)
	offer := func(name, value string) {
		if !l.has(name) && httpguts.ValidHeaderFieldValue(value) {
			l.set(name, value)
		}
	}
	offer("Idempotency-Key", m.id+":"+m.token)
	offer("X-Request-Id", m.id)
	for _, name := range []string{"traceparent", "tracestate", "baggage"} {
		if v := m.metadata[name]; v != "" {
			offer(textproto.CanonicalMIMEHeaderKey(name), v)
		}
	}
	l.set("X-Spillway-Lane", "batch")
	p.lines = l
	return nil
}

func statusLabel(status int) string { return strconv.Itoa(status) }
