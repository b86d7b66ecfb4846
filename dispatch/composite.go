package dispatch

import (
	"encoding/json"
	"fmt"
)

func (b *builder) composite(p *params, depth int) (*gate, error) {
	raw, _ := p.raw("gates")
	var all []struct {
		Type   string          `json:"gate_type"`
		Alias  string          `json:"type"`
		Params json.RawMessage `json:"gate_params"`
		More   json.RawMessage `json:"params"`
	}
	if err := json.Unmarshal(unquoted(raw), &all); err != nil {
		return nil, fmt.Errorf("gates: %w", err)
	}
	g := &gate{}
	var chained chain
	var inside []*gate
	for i, e := range all {
		if e.Type == "" {
			e.Type = e.Alias
		}
		if e.Params == nil {
			e.Params = e.More
		}
		inner, err := b.build(e.Type, e.Params, depth+1)
		if err != nil {
			return nil, fmt.Errorf("gates: entry %d: %w", i+1, err)
		}
		if g.pool == "" {
			g.pool = inner.pool
		}
		g.inputs, inside = append(g.inputs, inner.inputs...), append(inside, inner)
		if inner.admit != nil {
			chained = append(chained, inner.admit)
		}
	}
	if len(chained) > 0 {
		g.admit = chained
	}
	g.whole = func() admission {
		var all chain
		for _, inner := range inside {
			if a := inner.whole(); a != nil {
				all = append(all, a)
			}
		}
		if len(all) == 0 {
			return nil
		}
		return all
	}
	return g, nil
}

func (b *builder) waitOnRefuse(p *params, depth int) (*gate, error) {
	raw, _ := p.raw("gate")
	inner := newParams(raw)
	kind := inner.text("gate_type", inner.text("type", ""))
	text, ok := inner.raw("gate_params")
	if !ok {
		text, _ = inner.raw("params")
	}
	if inner.err != nil {
		return nil, inner.err
	}
	g, err := b.build(kind, text, depth+1)
	if err != nil {
		return nil, err
	}
	if g.admit != nil {
		g.admit = waitOnRefuse{g.admit}
	}
	whole := g.whole
	g.whole = func() admission {
		a := whole()
		if a != nil {
			a = waitOnRefuse{a}
		}
		return a
	}
	return g, nil
}

func (b *builder) tier(p *params, depth int) (*gate, error) {
	kind, label := p.required("saturation_gate"), p.text("tier_label", "tier")
	raw, _ := p.raw("saturation_gate_params")
	if p.err != nil {
		return nil, p.err
	}
	inner, err := b.build(kind, unquoted(raw), depth+1)
	if err != nil {
		return nil, err
	}
	whole := inner.whole()
	if whole == nil {
		return nil, fmt.Errorf("saturation_gate: %s refuses no message", kind)
	}
	return &gate{pool: inner.pool, admit: tierAdmission{whole, label}}, nil
}
