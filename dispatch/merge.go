package dispatch

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/textproto"
	"os"
	"slices"
	"strconv"

	"golang.org/x/net/http/httpguts"
)

// mergePolicy is how the queues of a group take turns, and what of that is told to the gateway.
type mergePolicy struct {
	kind              string // deadline, random-robin or tier-priority
	priorityHeader    string
	tierLabel         string
	fairnessHeader    string // "" for none
	fairnessAttribute string
}

func readMerge(path string) (*mergePolicy, error) {
	var doc struct {
		Type       string `json:"type"`
		Parameters struct {
			PriorityHeader    string  `json:"priority_header"`
			TierLabel         string  `json:"tier_label"`
			FairnessHeader    *string `json:"fairness_header"`
			FairnessAttribute string  `json:"fairness_attribute"`
		} `json:"parameters"`
	}
	doc.Type = "deadline"
	if path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		doc.Type = "random-robin"
		if err := strict(text, &doc); err != nil {
			return nil, err
		}
	}
	p := &mergePolicy{
		kind: doc.Type, priorityHeader: cmp.Or(doc.Parameters.PriorityHeader, "x-gateway-priority"), tierLabel: cmp.Or(doc.Parameters.TierLabel, "tier"),
		fairnessHeader: "x-llm-d-inference-fairness-id", fairnessAttribute: cmp.Or(doc.Parameters.FairnessAttribute, "userid"),
	}
	if f := doc.Parameters.FairnessHeader; f != nil {
		p.fairnessHeader = *f
	}
	if !slices.Contains([]string{"deadline", "random-robin", "tier-priority"}, p.kind) {
		return nil, fmt.Errorf("type %q is none of deadline, random-robin, tier-priority", p.kind)
	}
	for _, name := range []string{p.priorityHeader, p.fairnessHeader} {
		if name != "" && !httpguts.ValidHeaderFieldName(name) {
			return nil, fmt.Errorf("%q is no name of a header", name)
		}
	}
	p.priorityHeader, p.fairnessHeader = textproto.CanonicalMIMEHeaderKey(p.priorityHeader), textproto.CanonicalMIMEHeaderKey(p.fairnessHeader)
	return p, nil
}

// order puts the heads of queues, each in its own order, into the order in which they are to go.
func (p *mergePolicy) order(queues [][]head, rng *rand.Rand) []head {
	if len(queues) == 1 && p.kind != "tier-priority" {
		return queues[0]
	}
	var all []head
	switch p.kind {
	case "random-robin":
		for len(queues) > 0 {
			i := rng.IntN(len(queues))
			all = append(all, queues[i][0])
			if queues[i] = queues[i][1:]; len(queues[i]) == 0 {
				queues = slices.Delete(queues, i, i+1)
			}
		}
	case "tier-priority":
		for turn := 0; ; turn++ { // round robin, and then by lane
			n := len(all)
			for _, q := range queues {
				if turn < len(q) {
					all = append(all, q[turn])
				}
			}
			if len(all) == n {
				break
			}
		}
		slices.SortStableFunc(all, func(a, b head) int { return cmp.Compare(p.lane(a.m, a.grant), p.lane(b.m, b.grant)) })
	default:
		for _, q := range queues {
			all = append(all, q...)
		}
		slices.SortStableFunc(all, func(a, b head) int { return cmp.Compare(a.m.score, b.m.score) })
	}
	return all
}

// lane is 0 to 5: first what is within its quota, interactive before async before the rest.
func (p *mergePolicy) lane(m *message, g *grant) int {
	lane := 3
	if g.label(m, "classification") == "reserved" {
		lane = 0
	}
	switch g.label(m, p.tierLabel) {
	case "interactive":
		return lane
	case "async":
		return lane + 1
	}
	return lane + 2
}

// stamp adds the headers by which the gateway knows whose the request is and how much it matters.
func (p *mergePolicy) stamp(l *lines, m *message, g *grant) {
	if p.fairnessHeader != "" {
		if v := m.metadata[p.fairnessAttribute]; v != "" && len(v) <= 256 && httpguts.ValidHeaderFieldValue(v) {
			l.set(p.fairnessHeader, v)
		}
	}
	if p.kind == "tier-priority" {
		l.set(p.priorityHeader, strconv.Itoa(p.lane(m, g)))
	}
}

// transformer changes what is sent of some messages.
type transformer interface {
	// validate tells what is wrong with a message that is its business.
	validate(m *message, fields []member) error
	// transform returns a body and its type, or false if the message is none of its business.
	transform(m *message, fields []member) (body []byte, contentType string, ok bool, err error)
}

func readTransforms(path string) ([]transformer, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var doc struct {
		All []struct {
			Name       string          `json:"name"`
			Type       string          `json:"type"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"requestTransforms"`
	}
	if err := strict(text, &doc); err != nil {
		return nil, err
	}
	var all []transformer
	seen := map[string]bool{}
	for _, e := range doc.All {
		if e.Name == "" || seen[e.Name] {
			return nil, fmt.Errorf("transform %q: needs a name of its own", e.Name)
		}
		seen[e.Name] = true
		if e.Type != "gcs_uri_multipart" {
			return nil, fmt.Errorf("transform %q: unknown type %q", e.Name, e.Type)
		}
		t := &gcsMultipart{}
		if err := strict(e.Parameters, t); err != nil || len(t.Providers) == 0 {
			return nil, fmt.Errorf("transform %q: providers must be a list: %w", e.Name, err)
		}
		all = append(all, t)
	}
	return all, nil
}
