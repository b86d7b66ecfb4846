package proxy

import (
	"bytes"
	"encoding/json"
	"slices"

	"spillway/httperr"
)

// edited returns the body to forward: the client's bytes, unless a top-level key has to change.
// Only then is anything copied, and every other byte stays as it was.
func (x *exchange) edited() ([]byte, error) {
	body := x.body
	type edit struct {
		at   span
		with string
	}
	var edits []edit
	if x.scan.modelKind == str && x.target.Served != x.askedModel {
		name, err := json.Marshal(x.target.Served)
		if err != nil {
			return nil, &httperr.Error{Status: 500, Cause: httperr.Internal, Message: "Internal server error", Detail: err}
		}
		edits = append(edits, edit{x.scan.modelSpan, string(name)})
	}
	if x.addUsage && x.ep.streams {
		at, with := x.scan.usageEdit()
		edits = append(edits, edit{at, with})
	}
	if salt := x.saltEdit(); salt != "" {
		if at := x.scan.saltSpan; at != (span{}) {
			edits = append(edits, edit{at, salt})
		} else { // the body is not empty: it has a prompt
			edits = append(edits, edit{span{x.scan.end, x.scan.end}, `,"cache_salt":` + salt})
		}
	}
	if size := len(body) + 128 + 8*len(x.tenant); len(edits) > 0 {
		if !x.memory.more(size) {
			return nil, x.unread(x.noMemory())
		}
		slices.SortFunc(edits, func(a, b edit) int { return a.at.from - b.at.from })
		out := make([]byte, 0, size)
		from := 0
		for _, e := range edits {
			out = append(append(out, body[from:e.at.from]...), e.with...)
			from = e.at.to
		}
		body = append(out, body[from:]...)
	}
	if x.s.cfg.StripNvext && x.scan.nvext != absent {
		if !x.memory.more(len(body)) {
			return nil, x.unread(x.noMemory())
		}
		return without(body, "nvext")
	}
	return body, nil
}

// saltEdit is the cache salt, in JSON, that a body has to get, or "": where tenants share a partition,
// engines are to tell in their KV events whose block it is.
func (x *exchange) saltEdit() string {
	none := !x.scan.saltKind.given() || x.scan.saltKind == str && x.scan.salt.size() == 0
	if none && x.s.kv && x.ep.dialect == openAI && x.ep.decodes && x.tenantSalt() != "" {
		if c := x.s.caches.of(x.target.Partition.Key); c != nil && c.byEvents.Load() {
			salt, _ := json.Marshal(saltTag + x.tenant) // a string always has a form
			return string(salt)
		}
	}
	return ""
}

// usageEdit is the smallest change by which a body asks for usage.
func (s *scanned) usageEdit() (at span, with string) {
	switch end := s.optionsSpan.to - 1; {
	case s.streamOptions == absent: // the body is not empty: it has "stream"
		return span{s.end, s.end}, `,"stream_options":{"include_usage":true}`
	case s.streamOptions != object:
		return s.optionsSpan, `{"include_usage":true}`
	case s.usageSpan != span{}:
		return s.usageSpan, "true"
	case s.optionsEmpty:
		return span{end, end}, `"include_usage":true`
	default:
		return span{end, end}, `,"include_usage":true`
	}
}

// without removes a top-level member, every time that it occurs. All other bytes stay.
func without(body []byte, key string) ([]byte, error) {
	c := cursor{b: body}
	from := bytes.IndexByte(body, '{') + 1 // later: where the member before ended
	out := append(make([]byte, 0, len(body)), body[:from]...)
	members, kept := 0, 0
	err := c.object(func(name text) error {
		if err := c.skip(1); err != nil {
			return err
		}
		member := body[from:c.i] // with the comma before it, unless it is the first
		from = c.i
		members++
		if name.is(key) {
			return nil
		}
		if kept == 0 && members > 1 {
			member = member[bytes.IndexByte(member, ',')+1:]
		}
		kept++
		out = append(out, member...)
		return nil
	})
	if err != nil {
		return nil, malformed(&c, err)
	}
	return append(out, body[from:]...), nil
}
