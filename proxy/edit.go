package proxy

import (
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
	if x.addUsage {
		at, with := x.scan.optionsSpan, `{"include_usage":true}`
		switch x.scan.streamOptions {
		case absent:
			at, with = span{x.scan.end, x.scan.end}, `,"stream_options":`+with
		case object:
			var fields map[string]json.RawMessage
			if err := json.Unmarshal(body[at.from:at.to], &fields); err != nil {
				return nil, httperr.Invalid("stream_options must be an object")
			}
			fields["include_usage"] = json.RawMessage("true")
			b, err := json.Marshal(fields)
			if err != nil {
				return nil, &httperr.Error{Status: 500, Cause: httperr.Internal, Message: "Internal server error", Detail: err}
			}
			with = string(b)
		}
		edits = append(edits, edit{at, with})
	}
	if len(edits) > 0 {
		slices.SortFunc(edits, func(a, b edit) int { return a.at.from - b.at.from })
		out := make([]byte, 0, len(body)+128)
		from := 0
		for _, e := range edits {
			out = append(append(out, body[from:e.at.from]...), e.with...)
			from = e.at.to
		}
		body = append(out, body[from:]...)
	}
	if x.s.cfg.StripNvext && x.scan.nvext != absent {
		return withoutKey(body, "nvext")
	}
	return body, nil
}

// withoutKey removes a top-level member. Values keep their bytes, only the order of keys changes.
func withoutKey(body []byte, key string) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return nil, httperr.Invalid("the request body is not valid JSON")
	}
	delete(fields, key)
	return json.Marshal(fields)
}
