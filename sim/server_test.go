package sim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fast is a default server a hundred times as fast, on free ports.
func fast() sim.Config {
	cfg := sim.DefaultConfig()
	cfg.Port, cfg.Speed = 0, 100
	return cfg
}

// serve runs a server until the test ends and returns the base URLs of its workers.
func serve(t *testing.T, cfg sim.Config) []string {
	t.Helper()
	urls, stop := serveUntil(t, cfg)
	t.Cleanup(stop)
	return urls
}

func serveUntil(t *testing.T, cfg sim.Config) (urls []string, stop func()) {
	t.Helper()
	s, err := sim.New(cfg, discard())
	if err != nil {
		t.Fatal(err)
	}
	lns, err := sim.Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, ln := range lns {
		urls = append(urls, "http://"+ln.Addr().String())
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, lns) }()
	return urls, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run() = %v", err)
		}
		http.DefaultClient.CloseIdleConnections()
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// post sends body and returns status and answer.
func post(t *testing.T, url, body string, header ...string) (int, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return answer(t, req)
}

func get(t *testing.T, url string) (int, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	return answer(t, req)
}

func answer(t *testing.T, req *http.Request) (int, []byte) {
	t.Helper()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, data
}

// decode reads data as JSON into a T.
func decode[T any](t *testing.T, data []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("%v in %q", err, data)
	}
	return v
}

type usage struct {
	Prompt  int `json:"prompt_tokens"`
	Output  int `json:"completion_tokens"`
	Total   int `json:"total_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// reply is any answer or event of the text routes.
type reply struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Model   string `json:"model"`
	Choices []struct {
		Index   int
		Text    string
		Message struct{ Role, Content string }
		Delta   struct{ Role, Content string }
		Finish  *string `json:"finish_reason"`
	}
	Usage *usage
}

type stats struct {
	Running    int                             `json:"running"`
	Waiting    int                             `json:"waiting"`
	Used       int                             `json:"used_blocks"`
	Generated  uint64                          `json:"tokens_generated"`
	Lost       uint64                          `json:"tokens_never_delivered"`
	Late       uint64                          `json:"tokens_after_client_left"`
	Computed   uint64                          `json:"prefill_tokens_computed"`
	Cached     uint64                          `json:"prefill_tokens_cached"`
	Finished   uint64                          `json:"finished_requests"`
	Aborted    uint64                          `json:"aborted_requests"`
	Cut        uint64                          `json:"undelivered_requests"`
	Steps      uint64                          `json:"steps"`
	StepMillis struct{ P50, P99, Max float64 } `json:"step_lateness_ms"`
	Workers    []struct {
		Port  int
		Ranks []stats
	}
}

func statsOf(t *testing.T, url string) stats {
	t.Helper()
	_, data := get(t, url+"/sim/stats")
	return decode[stats](t, data)
}

// until waits for cond to become true of the stats.
func until(t *testing.T, url, what string, cond func(stats) bool) stats {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(2 * time.Millisecond) {
		s := statsOf(t, url)
		if cond(s) {
			return s
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %+v", what, s)
		}
	}
}

// events cuts a stream into the JSON of its events and wants [DONE] at its end.
func events(t *testing.T, data []byte) []reply {
	t.Helper()
	var out []reply
	parts := bytes.Split(data, []byte("\n\n"))
	for i, p := range parts {
		p, ok := bytes.CutPrefix(p, []byte("data: "))
		switch {
		case i == len(parts)-1 && !ok && len(p) == 0:
		case !ok:
			t.Fatalf("not an event: %q", p)
		case string(p) == "[DONE]":
			if i != len(parts)-2 {
				t.Fatalf("[DONE] is event %d of %d", i, len(parts)-1)
			}
		default:
			out = append(out, decode[reply](t, p))
		}
	}
	if len(parts) < 2 || !bytes.HasSuffix(parts[len(parts)-2], []byte("[DONE]")) {
		t.Fatalf("no [DONE] at the end of %q", data)
	}
	return out
}

// rank makes a copy of cfg with many of them.
func ranks(cfg sim.Config, n int) sim.Config {
	cfg.DPSize = n
	return cfg
}

const hello = `{"model":"sim-model","messages":[{"role":"user","content":"tell me something long"}],"max_tokens":20%s}`

func chatBody(more string) string { return fmt.Sprintf(hello, more) }
