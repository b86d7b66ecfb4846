package replay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/replay"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// asked is what a request body said.
type asked struct {
	Model     string `json:"model"`
	Prompt    string `json:"prompt"`
	MaxTokens int    `json:"max_tokens"`
	IgnoreEOS bool   `json:"ignore_eos"`
	Stream    bool   `json:"stream"`
	Options   struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Temperature *float64 `json:"temperature"`
	Messages    []struct {
		Role, Content string
	} `json:"messages"`
}

func (a asked) text() string {
	if len(a.Messages) > 0 {
		return a.Messages[0].Content
	}
	return a.Prompt
}

// serve starts a server whose handler gets each request decoded.
func serve(t *testing.T, h func(w http.ResponseWriter, r *http.Request, a asked)) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var a asked
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
			t.Errorf("request body: %v", err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		h(w, r, a)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

const chunk = `data: {"choices":[{"index":0,"delta":{"content":"word"}}]}` + "\n\n"

// answer streams n tokens as vLLM does, cached of the prompt's having been cached.
func answer(w http.ResponseWriter, a asked, cached int) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprint(w, `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`+"\n\n")
	fmt.Fprint(w, strings.Repeat(chunk, a.MaxTokens))
	fmt.Fprintf(w, `data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`+
		"\n\ndata: [DONE]\n\n", len(a.text())/4, a.MaxTokens, cached)
}

// load is a fixed load of n requests that arrive at almost the same time.
func load(url string, n int) replay.Config {
	cfg := replay.DefaultConfig()
	cfg.URL, cfg.Rate, cfg.Requests, cfg.ISLTokens, cfg.OSLTokens = url, 1000, n, 100, 5
	cfg.Timeout = 15 * time.Second
	return cfg
}

func mustRun(t *testing.T, cfg replay.Config) (replay.Report, string) {
	t.Helper()
	var out bytes.Buffer
	rep, err := replay.Run(t.Context(), cfg, &out)
	if err != nil {
		t.Fatalf("Run: %v", err)
	}
	if got := rep.Admitted + rep.Shed + rep.NotSent + rep.CutOff; got != rep.Offered {
		t.Errorf("admitted+shed+not sent+cut off = %d, want the %d offered", got, rep.Offered)
	}
	return rep, out.String()
}

func TestRunCompleted(t *testing.T) {
	for _, endpoint := range []string{"chat", "completions"} {
		t.Run(endpoint, func(t *testing.T) {
			url := serve(t, func(w http.ResponseWriter, r *http.Request, a asked) {
				want := map[string]string{"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
				if r.URL.Path != want || a.Model != "m" || a.MaxTokens != 5 || !a.IgnoreEOS || !a.Stream ||
					!a.Options.IncludeUsage || a.Temperature == nil || *a.Temperature != 0 {
					t.Errorf("asked %s %+v", r.URL.Path, a)
				}
				if len(a.text()) != 400 {
					t.Errorf("prompt of %d bytes, want 400", len(a.text()))
				}
				w.Header().Set("X-Spillway-Worker", "w1")
				answer(w, a, 25)
			})
			cfg := load(url, 20)
			cfg.Model, cfg.Endpoint, cfg.PIDs = "m", endpoint, []string{strconv.Itoa(os.Getpid())}
			rep, table := mustRun(t, cfg)
			if rep.Completed != 20 || rep.TooShort != 0 || rep.WithoutUsage != 0 || rep.ITL.Count != 80 || rep.TTFT.Count != 20 {
				t.Errorf("completed %d, too short %d, without usage %d, gaps %d, TTFTs %d; want 20, 0, 0, 80, 20",
					rep.Completed, rep.TooShort, rep.WithoutUsage, rep.ITL.Count, rep.TTFT.Count)
			}
			if rep.PromptTokens != 2000 || rep.OutputTokens != 100 || rep.CachedShare != 0.25 {
				t.Errorf("prompt %d, output %d, cached share %v; want 2000, 100, 0.25", rep.PromptTokens, rep.OutputTokens, rep.CachedShare)
			}
			if len(rep.Workers) != 1 || rep.Workers[0] != (replay.Share{Name: "w1", Count: 20, Share: 1}) {
				t.Errorf("workers %+v, want w1 with all", rep.Workers)
			}
			if rep.SLO.Met != 20 || rep.SendLag.Count != 20 || rep.CPU.OwnSeconds <= 0 || !strings.Contains(table, "validity:") {
				t.Errorf("met %d, lags %d, own CPU %v, table:\n%s", rep.SLO.Met, rep.SendLag.Count, rep.CPU.OwnSeconds, table)
			}
		})
	}
}

// The server answers nothing before all requests have arrived, so a client that waited for an
// answer before sending the next would never get one.
func TestRunIsOpenLoop(t *testing.T) {
	const n = 50
	var arrived atomic.Int64
	all := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request, a asked) {
		if arrived.Add(1) == n {
			close(all)
		}
		select {
		case <-all:
			answer(w, a, 0)
		case <-r.Context().Done():
		}
	})
	if rep, _ := mustRun(t, load(url, n)); rep.Completed != n {
		t.Errorf("completed %d, want %d: %+v", rep.Completed, n, rep.FailedBy)
	}
}

func TestRunCountsEveryOutcome(t *testing.T) {
	var n atomic.Int64
	hold := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request, a asked) {
		w.Header().Set("X-Spillway-Worker", "w")
		switch n.Add(1) {
		case 1:
			answer(w, a, 0)
		case 2:
			w.Header().Set("X-Spillway-Reason", "overloaded")
			w.WriteHeader(http.StatusServiceUnavailable)
		case 3:
			w.WriteHeader(http.StatusTooManyRequests)
		case 4:
			w.WriteHeader(529)
		case 5:
			w.WriteHeader(http.StatusInternalServerError)
		case 6: // ends well, but without [DONE]
			fmt.Fprint(w, chunk)
		case 7: // the connection breaks
			fmt.Fprint(w, chunk)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		case 8:
			fmt.Fprint(w, chunk, `data: {"error":{"message":"x","type":"internal_server_error","code":500}}`, "\n\ndata: [DONE]\n\n")
		case 9:
			fmt.Fprint(w, "event: error\ndata: {\"type\":\"error\"}\n\n")
		case 10: // no response at all
			panic(http.ErrAbortHandler)
		case 11: // no patience is long enough
			fmt.Fprint(w, chunk)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-hold:
			}
		}
	})
	defer close(hold)
	cfg := load(url, 11)
	cfg.Timeout = 2 * time.Second
	rep, _ := mustRun(t, cfg)
	names := func(all []replay.Share) map[string]int {
		m := map[string]int{}
		for _, s := range all {
			m[s.Name] = s.Count
		}
		return m
	}
	wantShed := "map[overloaded:1 status 429:1 status 529:1]"
	wantFailed := "map[error event:2 no response:1 status 500:1 timeout:1 truncated:2]"
	if got := fmt.Sprint(names(rep.ShedBy)); got != wantShed || rep.Shed != 3 {
		t.Errorf("shed %d %s, want 3 %s", rep.Shed, got, wantShed)
	}
	if got := fmt.Sprint(names(rep.FailedBy)); got != wantFailed || rep.Failed != 7 {
		t.Errorf("failed %d %s, want 7 %s", rep.Failed, got, wantFailed)
	}
	if rep.Completed != 1 || rep.Admitted != 8 || rep.SLO.MetShare != 1.0/8 {
		t.Errorf("completed %d, admitted %d, met share %v; want 1, 8, 0.125", rep.Completed, rep.Admitted, rep.SLO.MetShare)
	}
}

func TestRunConnectFailure(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + ln.Addr().String()
	ln.Close()
	rep, _ := mustRun(t, load(url, 3))
	if len(rep.FailedBy) != 1 || rep.FailedBy[0] != (replay.Share{Name: "connect", Count: 3, Share: 1}) {
		t.Errorf("failed %+v, want 3 connect", rep.FailedBy)
	}
}

// stall streams one token and then waits for the client to go.
func stall(w http.ResponseWriter, r *http.Request, _ asked) {
	fmt.Fprint(w, chunk)
	_ = http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

func TestRunClientsLeave(t *testing.T) {
	cfg := load(serve(t, stall), 10)
	cfg.Leave, cfg.LeaveAfter = 1, 50*time.Millisecond
	rep, _ := mustRun(t, cfg)
	if rep.Left != 10 || rep.Failed != 0 || rep.Admitted != 10 || rep.SLO.Met != 0 {
		t.Errorf("left %d, failed %d, admitted %d, met %d; want 10, 0, 10, 0", rep.Left, rep.Failed, rep.Admitted, rep.SLO.Met)
	}
}

func TestRunBoundsWhatIsInFlight(t *testing.T) {
	cfg := load(serve(t, stall), 10)
	cfg.MaxInFlight, cfg.Timeout = 4, 500*time.Millisecond
	rep, table := mustRun(t, cfg)
	if rep.NotSent != 6 || rep.Failed != 4 {
		t.Errorf("not sent %d, failed %d; want 6, 4", rep.NotSent, rep.Failed)
	}
	if rep.Validity.OK || !strings.Contains(table, "--max-in-flight failed") {
		t.Errorf("validity %+v of a run that did not send all, table:\n%s", rep.Validity, table)
	}
}

func TestRunInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var n atomic.Int64
	cfg := load(serve(t, func(w http.ResponseWriter, r *http.Request, a asked) {
		if n.Add(1) == 3 {
			cancel()
		}
		stall(w, r, a)
	}), 1000)
	cfg.Rate = 20 // 50 s, if it were not interrupted
	var out bytes.Buffer
	rep, err := replay.Run(ctx, cfg, &out)
	if err != nil || !rep.Interrupted || rep.CutOff < 3 || rep.CutOff != rep.Offered || rep.Validity.OK {
		t.Errorf("Run = %v, interrupted %v, cut off %d of %d; want no error, true, all", err, rep.Interrupted, rep.CutOff, rep.Offered)
	}
	if !strings.Contains(out.String(), "interrupted") {
		t.Errorf("the table does not say that the run was interrupted:\n%s", out.String())
	}
}

func TestRunObjectives(t *testing.T) {
	for _, tt := range []struct {
		name             string
		ttft             string
		itl              time.Duration
		met, first, gaps int
	}{
		{"none", "", 0, 5, 0, 0},
		{"both met", "1m", time.Minute, 5, 0, 0},
		{"first token too late", "1ns", time.Minute, 0, 5, 0},
		{"gaps too long", "1m", time.Nanosecond, 0, 0, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := load(serve(t, func(w http.ResponseWriter, _ *http.Request, a asked) {
				fmt.Fprint(w, chunk)
				_ = http.NewResponseController(w).Flush()
				time.Sleep(100 * time.Millisecond) // so that the two chunks are two reads
				answer(w, a, 0)
			}), 5)
			cfg.SLOTTFT, cfg.SLOITL = tt.ttft, tt.itl
			rep, _ := mustRun(t, cfg)
			if rep.SLO.Met != tt.met || rep.SLO.MissedTTFT != tt.first || rep.SLO.MissedITL != tt.gaps {
				t.Errorf("met %d, missed TTFT %d, ITL %d; want %d, %d, %d",
					rep.SLO.Met, rep.SLO.MissedTTFT, rep.SLO.MissedITL, tt.met, tt.first, tt.gaps)
			}
			if good := rep.Goodput.Requests > 0; good != (tt.met > 0) {
				t.Errorf("goodput %v with %d good", rep.Goodput, tt.met)
			}
		})
	}
}

func TestRunWarmupIsNotReported(t *testing.T) {
	var n atomic.Int64
	cfg := load(serve(t, func(w http.ResponseWriter, _ *http.Request, a asked) { n.Add(1); answer(w, a, 0) }), 10)
	cfg.Rate, cfg.Warmup = 100, 55*time.Millisecond // due at 0, 10, ... 90 ms
	rep, _ := mustRun(t, cfg)
	if rep.Warmup != 6 || rep.Offered != 4 || rep.TTFT.Count != 4 || n.Load() != 10 {
		t.Errorf("warm-up %d, offered %d, TTFTs %d, served %d; want 6, 4, 4, 10", rep.Warmup, rep.Offered, rep.TTFT.Count, n.Load())
	}
}

func TestRunWritesJSON(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, _ *http.Request, a asked) { answer(w, a, 0) })
	cfg := load(url, 3)
	cfg.JSON = filepath.Join(t.TempDir(), "report.json")
	want, table := mustRun(t, cfg)
	stored, err := os.ReadFile(cfg.JSON)
	if err != nil {
		t.Fatal(err)
	}
	var got replay.Report
	if err := json.Unmarshal(stored, &got); err != nil || got.ArrivalHash != want.ArrivalHash || got.Completed != 3 {
		t.Errorf("stored report: %v, hash %q, completed %d", err, got.ArrivalHash, got.Completed)
	}
	if !strings.Contains(table, want.ArrivalHash) {
		t.Errorf("no hash in the table:\n%s", table)
	}
	cfg.JSON = "-"
	if _, text := mustRun(t, cfg); json.Unmarshal([]byte(text), &got) != nil {
		t.Errorf("--json - printed %s", text)
	}
}
