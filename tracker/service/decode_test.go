package service_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"spillway/tracker/service"
)

// FuzzBody compares the decoder with encoding/json, as far as the two agree on what JSON is: what
// is taken is JSON, and what is JSON is never refused as if it were not.
func FuzzBody(f *testing.F) {
	for _, s := range []string{
		"", "{}", "null", "[1]", `{"a":[1,{"b":null}],"a":"\u00e9\ud83d\ude00"}`, `{"model_name":"m","request_id":"r","worker_id":1,"dp_rank":0,"sequence_hashes":[1,-2]}`,
		`{"sequence_hashes":[9223372036854775808]}`, `{"worker_id":1e999}`, `{"x":1e999}`, `{"model_name":"\ud800"}`, `{"dp_rank":-0, "x":tru`, `{"x":[[[[{}]]]]} z`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		status, read := service.Decode(body)
		nested := bytes.Count(body, []byte("[")) + bytes.Count(body, []byte("{"))
		if nested > 9000 {
			return // encoding/json gives up at 10,000
		}
		if status == 0 && !json.Valid(body[:read]) {
			t.Errorf("Decode(%q) took %q, which is not JSON", body, body[:read])
		}
		// Half a surrogate pair and numbers beyond a float64 are JSON to encoding/json alone.
		if plain := utf8.Valid(body) && !bytes.Contains(body, []byte(`\u`)) && !strings.ContainsAny(string(body), "eE") && len(body) < 300; plain && json.Valid(body) && status == 400 {
			t.Errorf("Decode(%q) = 400, but it is JSON", body)
		}
		if status != 0 && status != 400 && status != 422 {
			t.Errorf("Decode(%q) = %d", body, status)
		}
	})
}
