package proxy

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"spillway/router"
)

// checkEdits makes every edit and compares the result member by member with what was sent.
func checkEdits(t *testing.T, body []byte, s *scanned) {
	t.Helper()
	if s.streamOptions.given() && s.streamOptions != object { // check would have refused it
		return
	}
	for edits := range 8 {
		x := edited(body, s, edits&1 != 0, edits&2 != 0 && s.stream == yes, edits&4 != 0)
		got, err := x.edited()
		if err != nil {
			t.Fatalf("edited(%q) of kind %d: %v", body, edits, err)
		}
		want, have := members(t, body), members(t, got)
		if x.target.Served != x.askedModel && s.modelKind == str {
			want["model"] = `"served <as> this"`
			have["model"] = strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(have["model"])
		}
		if x.s.cfg.StripNvext {
			delete(want, "nvext")
		}
		if x.addUsage {
			wanted, options := members(t, []byte(or(want["stream_options"], "{}"))), members(t, []byte(have["stream_options"]))
			if wanted == nil {
				wanted = map[string]string{}
			}
			wanted["include_usage"] = "true"
			if !reflect.DeepEqual(options, wanted) {
				t.Errorf("edited(%q): stream_options are %v, want %v", body, options, wanted)
			}
			delete(want, "stream_options")
			delete(have, "stream_options")
		}
		if !reflect.DeepEqual(have, want) {
			t.Errorf("edited(%q) of kind %d = %q, want %q", body, edits, have, want)
		}
	}
}

func or(s, instead string) string {
	if s == "" {
		return instead
	}
	return s
}

// members are the raw values of an object by key.
func members(t *testing.T, body []byte) map[string]string {
	t.Helper()
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(body, &raw); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	m := map[string]string{}
	for k, v := range raw {
		m[k] = string(v)
	}
	return m
}

// edited is an exchange whose body has been scanned and is to be edited.
func edited(body []byte, s *scanned, model, usage, nvext bool) *exchange {
	x := &exchange{s: &Server{cfg: Config{StripNvext: nvext}}, ep: &endpoints[0], body: body, scan: *s, addUsage: usage, memory: bodyMemory{budget: &budget{limit: 1 << 20}}}
	x.askedModel = s.model.string()
	x.target = router.Target{Served: x.askedModel}
	if model {
		x.target.Served = "served <as> this"
	}
	return x
}

// TestEdited shows that an edit leaves every other byte as it was.
func TestEdited(t *testing.T) {
	const with = `"stream_options":{"include_usage":true}`
	for _, tt := range []struct {
		name, body          string
		model, usage, nvext bool
		want                string
	}{
		{"nothing", ` { "model" : "m", "a":1.0 } `, false, false, false, ` { "model" : "m", "a":1.0 } `},
		{"alias", ` { "model" : "m", "a":9007199254740993 } `, true, false, false, ` { "model" : "served \u003cas\u003e this", "a":9007199254740993 } `},
		{"alias given twice: the last one counts", `{"model":"a","model":"m"}`, true, false, false, `{"model":"a","model":"served \u003cas\u003e this"}`},
		{"usage added", `{"stream":true ,"z":{"b":1,"a":"<"} } `, false, true, false, `{"stream":true ,"z":{"b":1,"a":"<"} ,` + with + `} `},
		{"usage for null", `{"stream":true,"stream_options": null}`, false, true, false, `{"stream":true,"stream_options": {"include_usage":true}}`},
		{"usage for an empty object", `{"stream_options":{ },"stream":true}`, false, true, false, `{"stream_options":{ "include_usage":true},"stream":true}`},
		{"usage merged", `{"stream_options":{"x":[1, 2] },"stream":true}`, false, true, false, `{"stream_options":{"x":[1, 2] ,"include_usage":true},"stream":true}`},
		{"usage replaced", `{"stream_options":{"include_usage" : false,"x":"<"},"stream":true}`, false, true, false, `{"stream_options":{"include_usage" : true,"x":"<"},"stream":true}`},
		{"nvext after a value with a comma", `{"b":[1,2],"nvext":1}`, false, false, true, `{"b":[1,2]}`},
		{"nvext first", `{ "nvext":{"a":[",","}"]} , "b":1, "c":2}`, false, false, true, `{ "b":1, "c":2}`},
		{"nvext in the middle", `{"b":1 , "nvext":null , "c":2}`, false, false, true, `{"b":1 , "c":2}`},
		{"nvext last", `{"b":1 , "nvext":[] }`, false, false, true, `{"b":1 }`},
		{"nvext alone", ` { "nvext":0 } `, false, false, true, ` { } `},
		{"nvext again and again", `{"nvext":1,"nvext":2,"b":"nvext","nv\u0065xt":3,"c":4,"nvext":5}`, false, false, true, `{"b":"nvext","c":4}`},
		{"nvext kept", `{"nvext":1,"b":2}`, false, false, false, `{"nvext":1,"b":2}`},
		{"all at once", `{"nvext":1,"stream":true,"model":"m"}`, true, true, true, `{"stream":true,"model":"served \u003cas\u003e this",` + with + `}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, bad := scan([]byte(tt.body))
			if bad != nil {
				t.Fatal(bad)
			}
			got, err := edited([]byte(tt.body), &s, tt.model, tt.usage, tt.nvext).edited()
			if err != nil || string(got) != tt.want {
				t.Errorf("edited() of %s\n got %s, %v\nwant %s", tt.body, got, err, tt.want)
			}
		})
	}
}
