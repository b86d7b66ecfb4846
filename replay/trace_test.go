package replay_test

import (
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"spillway/replay"
)

func TestReadTrace(t *testing.T) {
	one := func(at time.Duration, isl, osl int, blocks ...uint64) replay.Request {
		return replay.Request{At: at, ISLTokens: isl, OSLTokens: osl, Blocks: blocks}
	}
	for _, tt := range []struct {
		name, format, text string
		want               []replay.Request
		err                string
	}{
		{"mooncake", "auto", `{"timestamp": 3000, "input_length": 513, "output_length": 2, "hash_ids": [7, 8]}`,
			[]replay.Request{one(0, 513, 2, 7, 8)}, ""},
		{"rebased and sorted", "mooncake", "\n" + `{"timestamp":5000.5,"input_length":1,"output_length":1,"type":"x"}` + "\n" +
			`{"timestamp":3000,"input_length":2,"output_length":1}` + "\r\n",
			[]replay.Request{one(0, 2, 1), one(2000500*time.Microsecond, 1, 1)}, ""},
		{"missing key", "auto", `{"timestamp":1,"input_length":1}`, nil, "line 1: output_length is missing"},
		{"too few ids", "auto", `{"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[1]}`, nil, "1 hash_ids for the 2 blocks"},
		{"negative id", "auto", `{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":[-1]}`, nil, "line 1"},
		{"no input", "auto", `{"timestamp":1,"input_length":0,"output_length":1}`, nil, "input of 0 tokens"},
		{"no output", "auto", `{"timestamp":1,"input_length":1,"output_length":0}`, nil, "output of 0 tokens"},
		{"before the start", "auto", `{"timestamp":-1,"input_length":1,"output_length":1}`, nil, "arrival"},
		{"cut line", "auto", "{\"timestamp\":1,\"input_length\":1,\"output_length\":1}\n{\"time", nil, "line 2"},
		{"csv", "auto", "0,10,20\n1.5, 30 ,40\n", []replay.Request{one(0, 10, 20), one(1500*time.Millisecond, 30, 40)}, ""},
		{"csv header", "auto", "Output_Tokens,\"arrival\",x,Input Tokens\n20,5,z,10\n", []replay.Request{one(0, 10, 20)}, ""},
		{"csv dates", "csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5000000,1,2\n2023-11-16 18:17:05,3,4\n",
			[]replay.Request{one(0, 1, 2), one(1500*time.Millisecond, 3, 4)}, ""},
		{"csv Unix times", "auto", "1700000000,1,2\n1700000060,1,2\n", []replay.Request{one(0, 1, 2), one(time.Minute, 1, 2)}, ""},
		{"csv header lacks a column", "auto", "time,input\n", nil, "line 1: the header does not name"},
		{"csv short line", "auto", "1,2\n", nil, "2 columns where 3"},
		{"csv word", "csv", "1,2,3\n1,b,3\n", nil, `line 2: input tokens: "b"`},
		{"csv no number", "csv", "NaN,1,1\n", nil, "header"},
		{"csv not a time", "csv", "1,1,1\nNaN,1,1\n", nil, "arrival"},
		{"empty", "auto", "", nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := replay.ReadTrace(strings.NewReader(tt.text), tt.format)
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("ReadTrace(%q) error = %v, want %q", tt.text, err, tt.err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("ReadTrace(%q) = %+v, want %+v", tt.text, got, tt.want)
			}
		})
	}
}

func TestReadTraceFile(t *testing.T) {
	f, err := os.Open("testdata/mooncake-250.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	reqs, err := replay.ReadTrace(f, "auto")
	if err != nil || len(reqs) != 250 || reqs[249].At != 86999*time.Millisecond {
		t.Errorf("ReadTrace = %d requests, %v; want 250, the last at 86.999 s", len(reqs), err)
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add(`{"timestamp": 3000, "input_length": 513, "output_length": 2, "hash_ids": [7, 8]}`, "mooncake")
	f.Add("time,isl,osl\n0.5,10,20\n", "csv")
	f.Add("2023-11-16 18:17:03.5,10,20\n1,1,1", "auto")
	f.Fuzz(func(t *testing.T, text, format string) {
		reqs, err := replay.ReadTrace(strings.NewReader(text), format)
		if err != nil {
			if reqs != nil {
				t.Errorf("ReadTrace(%q) = %d requests and %v", text, len(reqs), err)
			}
			return
		}
		for i, r := range reqs {
			if r.ISLTokens < 1 || r.OSLTokens < 1 || r.At < 0 || i > 0 && r.At < reqs[i-1].At {
				t.Errorf("ReadTrace(%q)[%d] = %+v", text, i, r)
			}
			if r.Blocks != nil && len(r.Blocks) != (r.ISLTokens+replay.BlockTokens-1)/replay.BlockTokens {
				t.Errorf("ReadTrace(%q)[%d] has %d blocks for %d tokens", text, i, len(r.Blocks), r.ISLTokens)
			}
		}
		if len(reqs) > 0 && reqs[0].At != 0 {
			t.Errorf("ReadTrace(%q) begins at %v", text, reqs[0].At)
		}
	})
}
