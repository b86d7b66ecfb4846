package proxy

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"spillway/busy"
)

// TestReadThresholds has the rows of the documented table of POST /busy_threshold and more. An
// answer of 200 shows what was read.
func TestReadThresholds(t *testing.T) {
	const d, p, f = `"active_decode_blocks_threshold":`, `"active_prefill_tokens_threshold":`, `"active_prefill_tokens_threshold_frac":`
	m := func(members string) string { return `{"model":"M",` + members + `}` }
	const notJSON = "the body is not valid JSON"
	const isFrac, isCount = ": must be a number", ": must be an integer from 0 to 2^63-1"
	for _, tt := range []struct {
		row, body string
		status    int
		want      string // the text, or what was read
	}{
		{"81", m(d + "0.85," + p + "10000"), 200, `{"model":"M",` + d + "0.85," + p + "10000}"},
		{"82", `{"model":"M"}`, 200, m(d + "null," + p + "null")},
		{"83", `{"model":"nope"}`, 200, `{"model":"nope",` + d + "null," + p + "null}"},
		{"84", `{"model":"nope",` + p + "1}", 200, `{"model":"nope",` + d + "null," + p + "1}"}, // the look-up comes later
		{"85", m(d + "1.1"), 400, "active_decode_blocks_threshold: 1.1 is not within 0..1"},
		{"85", m(d + "-0.1"), 400, "active_decode_blocks_threshold: -0.1 is not within 0..1"},
		{"86", m(d + "0.5," + f + "-1"), 400, "active_prefill_tokens_threshold_frac: -1 is not a finite number of at least 0"},
		{"87", m(p + "-1"), 422, "active_prefill_tokens_threshold" + isCount},
		{"87", m(p + "1.5"), 422, "active_prefill_tokens_threshold" + isCount},
		{"87", m(p + `"1"`), 422, "active_prefill_tokens_threshold" + isCount},
		{"88", `{"model":"nope",` + d + "2}", 400, "active_decode_blocks_threshold: 2 is not within 0..1"},
		{"89", `{}`, 422, "model: must be a string"},
		{"90", `{`, 400, notJSON},

		{"bounds of decode", m(d + "0"), 200, m(d + "0," + p + "null")},
		{"bounds of decode", m(d + "1"), 200, m(d + "1," + p + "null")},
		{"bounds of decode", m(d + "1.0000000001"), 400, "active_decode_blocks_threshold: 1.0000000001 is not within 0..1"},
		{"exponents", m(d + "85e-2"), 200, m(d + "0.85," + p + "null")},
		{"minus zero", m(d + "-0," + f + "-0.0"), 200, m(d + "0," + p + "null," + f + "0")},
		{"minus zero as a count", m(p + "-0"), 422, "active_prefill_tokens_threshold" + isCount},
		{"NaN", m(d + "NaN"), 400, notJSON},
		{"infinity", m(f + "Infinity"), 400, notJSON},
		{"beyond float64", m(d + "1e400"), 400, "active_decode_blocks_threshold: +Inf is not within 0..1"},
		{"beyond float64", m(f + "1e400"), 400, "active_prefill_tokens_threshold_frac: +Inf is not a finite number of at least 0"},
		{"beyond float64", m(f + "-1e400"), 400, "active_prefill_tokens_threshold_frac: -Inf is not a finite number of at least 0"},
		{"beyond float64 as a count", m(p + "1e400"), 422, "active_prefill_tokens_threshold" + isCount},
		{"a fraction may exceed 1", m(f + "1.5"), 200, m(d + "null," + p + "null," + f + "1.5")},
		{"a count with a point", m(p + "10000.0"), 422, "active_prefill_tokens_threshold" + isCount},
		{"a count with an exponent", m(p + "1e4"), 422, "active_prefill_tokens_threshold" + isCount},
		{"the largest count", m(p + "9223372036854775807"), 200, m(d + "null," + p + "9223372036854775807")},
		{"above it", m(p + "9223372036854775808"), 422, "active_prefill_tokens_threshold" + isCount},
		{"zero is a limit", m(d + "0," + p + "0"), 200, m(d + "0," + p + "0")},
		{"decode as a string", m(d + `"10000.0"`), 422, "active_decode_blocks_threshold" + isFrac},
		{"decode as a boolean", m(d + "true"), 422, "active_decode_blocks_threshold" + isFrac},
		{"decode as a list", m(d + "[0.5]"), 422, "active_decode_blocks_threshold" + isFrac},
		{"frac as an object", m(f + "{}"), 422, "active_prefill_tokens_threshold_frac" + isFrac},
		{"count as a boolean", m(p + "false"), 422, "active_prefill_tokens_threshold" + isCount},
		{"null is not given", m(d + "null," + p + " null ," + f + "null"), 200, m(d + "null," + p + "null")},
		{"unknown keys", m(`"x":{"y":[1]},` + p + "5"), 200, m(d + "null," + p + "5")},
		{"a key in other letters is unknown", m(`"ACTIVE_DECODE_BLOCKS_THRESHOLD":9`), 200, m(d + "null," + p + "null")},
		{"keys given twice: the last one counts", m(d + "7," + d + `0.5,"model":"N"`), 200, `{"model":"N",` + d + "0.5," + p + "null}"},
		{"keys given twice: the last one counts", m(d + "0.5," + d + "7"), 400, "active_decode_blocks_threshold: 7 is not within 0..1"},
		{"a model that is null", `{"model":null}`, 422, "model: must be a string"},
		{"a model that is a number", `{"model":5}`, 422, "model: must be a string"},
		{"an empty model", `{"model":"",` + d + "0.5}", 400, "model: must not be empty"},
		{"a list", `[]`, 422, "the body must be a JSON object"},
		{"null", `null`, 422, "the body must be a JSON object"},
		{"nothing", ``, 400, notJSON},
		{"white space", " \n", 400, notJSON},
		{"trailing garbage", `{"model":"M"} x`, 400, notJSON},
		{"two bodies", `{"model":"M"}{"model":"M"}`, 400, notJSON},
		{"a NUL", "{\"model\":\"M\"}\x00", 400, notJSON},
		{"form encoding", `model=M`, 400, notJSON},
		{"invalid UTF-8", "{\"model\":\"\xff\"}", 400, notJSON},
		{"a deep body", `{"model":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`, 400, notJSON},
		{"two bad ones", m(d + "2," + f + "-1"), 400, "active_decode_blocks_threshold: 2 is not within 0..1\nactive_prefill_tokens_threshold_frac: -1 is not a finite number of at least 0"},
	} {
		t.Run(tt.row, func(t *testing.T) {
			model, th, bad := readThresholds([]byte(tt.body))
			status, got := 200, ""
			if bad != nil {
				status, got = bad.status, bad.text
			} else {
				b, err := json.Marshal(modelThresholds{model, newThresholdsBody(th)})
				if err != nil {
					t.Fatal(err)
				}
				got = string(b)
			}
			if status != tt.status || got != tt.want {
				t.Errorf("readThresholds(%.100s)\n got %d %s\nwant %d %s", tt.body, status, got, tt.status, tt.want)
			}
		})
	}
}

func TestThresholdsInLogs(t *testing.T) {
	var buf bytes.Buffer
	log := slog.New(slog.NewTextHandler(&buf, nil))
	log.Info("x", "old", newThresholdsBody(busy.Thresholds{}), "new", newThresholdsBody(busy.Thresholds{DecodeFrac: new(0.85), PrefillTokens: new(uint64(10000))}))
	const want = "old.active_decode_blocks_threshold=unset old.active_prefill_tokens_threshold=unset old.active_prefill_tokens_threshold_frac=unset " +
		"new.active_decode_blocks_threshold=0.85 new.active_prefill_tokens_threshold=10000 new.active_prefill_tokens_threshold_frac=unset\n"
	if got := buf.String(); !strings.HasSuffix(got, want) {
		t.Errorf("logged %s, want it to end with %s", got, want)
	}
}
