package dispatch

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// params are the parameters of a gate: a JSON object whose scalars may also be given as strings, and
// whose nested objects as JSON in strings. The first thing that is wrong is kept in err.
type params struct {
	values map[string]json.RawMessage
	used   map[string]bool
	err    error
}

func newParams(raw json.RawMessage) *params {
	p := &params{values: map[string]json.RawMessage{}, used: map[string]bool{}}
	if text := unquoted(raw); len(text) > 0 && string(text) != "null" {
		if err := json.Unmarshal(text, &p.values); err != nil {
			p.fail("gate_params", err)
		}
	}
	return p
}

// unquoted is what a JSON string holds, and everything else as it is.
func unquoted(raw json.RawMessage) json.RawMessage {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return json.RawMessage(text)
	}
	return raw
}

func (p *params) fail(name string, err error) {
	if p.err == nil {
		p.err = fmt.Errorf("%s: %w", name, err)
	}
}

// close returns the first error; a parameter that nobody has asked for is one.
func (p *params) close() error {
	for _, name := range slices.Sorted(maps.Keys(p.values)) {
		if !p.used[name] {
			p.fail(name, errors.New("unknown parameter"))
		}
	}
	return p.err
}

func (p *params) raw(name string) (json.RawMessage, bool) {
	p.used[name] = true
	v, ok := p.values[name]
	return v, ok && string(v) != "null"
}

func (p *params) text(name, def string) string {
	v, ok := p.raw(name)
	if !ok {
		return def
	}
	return strings.TrimSpace(string(unquoted(v)))
}

// required is a text that must be there.
func (p *params) required(name string) string {
	v := p.text(name, "")
	if v == "" {
		p.fail(name, errors.New("is missing"))
	}
	return v
}

func (p *params) oneOf(name string, all ...string) string {
	v := p.text(name, all[0])
	if !slices.Contains(all, v) {
		p.fail(name, fmt.Errorf("%q is none of %s", v, strings.Join(all, ", ")))
	}
	return v
}

// number is within least and most; NaN as a default says that it was not given.
func (p *params) number(name string, def, least, most float64) float64 {
	v, ok := p.raw(name)
	if !ok {
		return def
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(string(unquoted(v))), 64)
	if err != nil || !(n >= least && n <= most) {
		p.fail(name, fmt.Errorf("%s is no number within %v..%v", v, least, most))
	}
	return n
}

func (p *params) integer(name string, def, least int) int {
	n := p.number(name, float64(def), float64(least), 1<<53)
	if n != math.Trunc(n) {
		p.fail(name, fmt.Errorf("%v is no whole number", n))
		return def
	}
	return int(n)
}

func (p *params) duration(name string, def time.Duration) time.Duration {
	v, ok := p.raw(name)
	if !ok {
		return def
	}
	d, err := time.ParseDuration(strings.TrimSpace(string(unquoted(v))))
	if err != nil || d < 0 {
		p.fail(name, fmt.Errorf("%s is no duration", v))
	}
	return d
}

func (p *params) boolean(name string) bool {
	v, ok := p.raw(name)
	if !ok {
		return false
	}
	b, err := strconv.ParseBool(string(unquoted(v)))
	if err != nil {
		p.fail(name, fmt.Errorf("%s is neither true nor false", v))
	}
	return b
}

func (p *params) labels(name string) map[string]string {
	v, ok := p.raw(name)
	if !ok {
		return nil
	}
	var all map[string]string
	if err := json.Unmarshal(unquoted(v), &all); err != nil {
		p.fail(name, err)
	}
	return all
}
