package replay_test

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// TestOracle: each request is preceded by a question, and what that says is compared with what the
// request found; questions without an answer are left out.
func TestOracle(t *testing.T) {
	target := serve(t, func(w http.ResponseWriter, _ *http.Request, a asked) { answer(w, a, 36) })
	var n atomic.Int64
	sims := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != "/sim/prefix" || asksFor(r) != `{"block_size":16,"hashes":[400,18446744073709551615]}`:
			t.Errorf("asked otherwise for %s", r.URL.Path)
		case n.Add(1)%5 == 0:
			w.WriteHeader(http.StatusInternalServerError)
		default:
			fmt.Fprint(w, `{"most":3}`)
		}
	}))
	defer sims.Close()
	cfg := load(target, 20)
	cfg.OracleURL = sims.URL + "/"
	cfg.PrefixHashes = func(text string, chat bool, blockSize int) []uint64 {
		if !chat || blockSize != 16 {
			t.Errorf("hashes of blocks of %d tokens, chat %v", blockSize, chat)
		}
		return []uint64{uint64(len(text)), math.MaxUint64}
	}
	rep, table := mustRun(t, cfg)
	o := rep.Oracle
	if o == nil || o.Requests != 16 || o.Unknown != 4 || o.BestTokens != 16*48 || o.CachedTokens != 16*36 || o.OfBest != 0.75 || o.BestShare != 0.48 {
		t.Fatalf("Oracle = %+v, want 16 requests with 36 of 48 tokens found, of 100", o)
	}
	if !strings.Contains(table, "768 tokens (48.0%) were cached on some rank") {
		t.Errorf("the table lacks the oracle:\n%s", table)
	}
	if rep.SendLag.P50MS == 0 {
		t.Errorf("send lag = %v: the requests left before they were due", rep.SendLag)
	}
	if rep.EndlessShare != 0 {
		t.Errorf("EndlessShare = %v of prompts that share nothing", rep.EndlessShare)
	}
	if rep, _ := mustRun(t, load(target, 1)); rep.Oracle != nil {
		t.Errorf("Oracle = %+v without a worker to ask", rep.Oracle)
	}
}

func asksFor(r *http.Request) string {
	body, _ := io.ReadAll(r.Body) // what cannot be read is not what was meant
	return string(body)
}

// TestEndlessCache: only what comes after the same beginning counts as known.
func TestEndlessCache(t *testing.T) {
	target := serve(t, func(w http.ResponseWriter, _ *http.Request, a asked) { answer(w, a, 0) })
	for trace, want := range map[string]float64{
		`{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}
{"timestamp":1,"input_length":1024,"output_length":1,"hash_ids":[1,2]}`: 0.5,
		`{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}
{"timestamp":1,"input_length":1024,"output_length":1,"hash_ids":[3,2]}`: 0,
		`{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}
{"timestamp":1,"input_length":1536,"output_length":1,"hash_ids":[1,3,2]}
{"timestamp":2,"input_length":1000,"output_length":1,"hash_ids":[1,3]}`: (512. + 1000) / (1024 + 1536 + 1000),
	} {
		cfg := load(target, 0)
		cfg.Rate, cfg.TracePath = 0, filepath.Join(t.TempDir(), "trace.jsonl")
		if err := os.WriteFile(cfg.TracePath, []byte(trace), 0o600); err != nil {
			t.Fatal(err)
		}
		if rep, _ := mustRun(t, cfg); rep.EndlessShare != want {
			t.Errorf("EndlessShare = %v, want %v, of\n%s", rep.EndlessShare, want, trace)
		}
	}
}
