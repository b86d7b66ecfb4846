package sim_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"

	"spillway/sim"
)

func TestSmallRoutes(t *testing.T) {
	url := serve(t, fast())[0]
	for _, tt := range []struct{ path, want string }{
		{"/health", ""},
		{"/ping", ""},
		{"/version", `"version":`},
		{"/v1/models", `"id":"sim-model"`},
		{"/v1/models", `"max_model_len":131072`},
	} {
		code, data := get(t, url+tt.path)
		if code != 200 || !strings.Contains(string(data), tt.want) || tt.want == "" && len(data) > 0 {
			t.Errorf("GET %s = %d %q, want %q", tt.path, code, data, tt.want)
		}
	}
}

func TestRefusals(t *testing.T) {
	cfg := ranks(fast(), 2)
	cfg.MaxModelLen, cfg.KVBlocks = 100, 5 // 80 tokens
	url := serve(t, cfg)[0]
	const chat, text, embed = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
	long := strings.Repeat("x", 4*100)
	for _, tt := range []struct {
		path, body, rank string
		code             int
		want             string
	}{
		{chat, `{`, "", 400, "not what this route takes"},
		{chat, `{"messages":[]}`, "", 400, "at least one message"},
		{chat, `{"messages":[{"content":"x"}]}`, "", 400, "messages[0] has no role"},
		{chat, `{"messages":[{"role":"user","content":7}]}`, "", 400, "messages[0].content"},
		{chat, `{"model":"other","messages":[{"role":"user","content":"x"}]}`, "", 404, "The model `other` does not exist."},
		{text, `{}`, "", 400, "1 to 2048 prompts, not 0"},
		{text, `{"prompt":""}`, "", 400, "cannot be empty"},
		{text, `{"prompt":[]}`, "", 400, "cannot be empty"},
		{text, `{"prompt":[1,-2]}`, "", 400, "not text, token IDs"},
		{text, `{"prompt":["x",""]}`, "", 400, "cannot be empty"},
		{text, `{"prompt":{"a":1}}`, "", 400, "not text, token IDs"},
		{text, `{"prompt":"x","n":0}`, "", 400, "n must be within 1..128, got 0"},
		{text, `{"prompt":"x","max_tokens":0}`, "", 400, "max_tokens must be at least 1, got 0."},
		{text, `{"prompt":"x","max_tokens":100}`, "", 400, "maximum context length is 100 tokens. However, you requested 101 tokens (1 in the messages, 100 in the completion)"},
		{text, `{"prompt":"` + long + `"}`, "", 400, "your request has 100 input tokens"},
		{text, `{"prompt":"` + long[:4*81] + `"}`, "", 400, "81 tokens does not fit into the KV cache of 80 tokens"},
		{text, `{"prompt":["x","` + long[:4*81] + `"],"stream":true}`, "", 400, "does not fit"},
		{text, `{"prompt":"x"}`, "2", 400, "X-Data-Parallel-Rank"},
		{text, `{"prompt":"x"}`, "-1", 400, "X-Data-Parallel-Rank"},
		{embed, `{"input":"` + long + `x"}`, "", 400, "requested 101 tokens in the input for embedding"},
		{embed, `{"input":"x","encoding_format":"int8"}`, "", 400, "float or base64"},
		{embed, `{"input":"x","dimensions":0}`, "", 400, "dimensions must be"},
		{"/tokenize", `{}`, "", 400, "at least one message"},
		{"/tokenize", `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true,"continue_final_message":true}`, "", 400, "Cannot set both"},
	} {
		var header []string
		if tt.rank != "" {
			header = []string{"x-data-parallel-rank", tt.rank}
		}
		code, data := post(t, url+tt.path, tt.body, header...)
		r := decode[struct {
			Error struct {
				Message, Type string
				Code          int
			}
		}](t, data)
		if code != tt.code || r.Error.Code != tt.code || r.Error.Type == "" || !strings.Contains(r.Error.Message, tt.want) {
			t.Errorf("POST %s %.80s = %d %s, want %d %q", tt.path, tt.body, code, data, tt.code, tt.want)
		}
	}
	if s := statsOf(t, url); s.Running != 0 || s.Waiting != 0 || s.Used != 0 {
		t.Errorf("after refusals: %+v", s)
	}
}

// Prompt and output that outgrow the rank end there.
func TestOutputThatOutgrowsTheCache(t *testing.T) {
	cfg := fast()
	cfg.KVBlocks = 2 // 32 tokens
	url := serve(t, cfg)[0]
	for _, more := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
		_, data := post(t, url+"/v1/completions", `{"max_tokens":100,"prompt":"`+strings.Repeat("x", 80)+`"`+more+`}`)
		var last reply
		finishes := 0
		if more == "" {
			last = decode[reply](t, data)
			finishes = 1
		} else {
			for _, ev := range events(t, data) {
				for _, c := range ev.Choices {
					if c.Finish != nil && *c.Finish == "length" {
						finishes++
					}
				}
				last = ev
			}
		}
		if last.Usage == nil || last.Usage.Output != 13 || finishes != 1 {
			t.Errorf("got %s, want 13 tokens and one finish", data)
		}
	}
}

func TestRanks(t *testing.T) {
	cfg := ranks(fast(), 3)
	cfg.Count, cfg.Speed = 2, 1
	urls := serve(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := func(rank string) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, urls[1]+"/v1/chat/completions",
			strings.NewReader(`{"stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"x"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		if rank != "" {
			req.Header.Set("X-data-parallel-rank", rank)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
	}
	open("2")
	open("2")
	open("1")
	for range 4 {
		open("") // the least loaded: 0, then 0 or 1, ...: two each with 3 on rank 2 at most
	}
	s := statsOf(t, urls[0])
	var got []int
	for _, r := range s.Workers[1].Ranks {
		got = append(got, r.Running)
	}
	if fmt.Sprint(got) != "[3 2 2]" || s.Running != 7 || s.Workers[0].Ranks[0].Running != 0 {
		t.Errorf("running = %v of %d, want [3 2 2] of 7", got, s.Running)
	}
	cancel()
	until(t, urls[0], "all gone", func(s stats) bool { return s.Running == 0 && s.Aborted == 7 && s.Used == 0 })
}

func TestClientThatLeaves(t *testing.T) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprint("stream=", stream), func(t *testing.T) {
			cfg := fast()
			cfg.Speed = 1
			url := serve(t, cfg)[0]
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
				strings.NewReader(fmt.Sprintf(`{"prompt":"x","max_tokens":100000,"stream":%v}`, stream)))
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				resp, err := http.DefaultClient.Do(req)
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				done <- err
			}()
			until(t, url, "generating", func(s stats) bool { return s.Generated > 3 })
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("client: %v, want canceled", err)
			}
			s := until(t, url, "aborted", func(s stats) bool { return s.Aborted == 1 })
			if s.Running != 0 || s.Used != 0 || s.Finished != 0 || s.Cut != 1 || s.Lost != s.Generated || s.Late > s.Lost {
				t.Errorf("stats = %+v", s)
			}
		})
	}
}

func TestStopCutsStreams(t *testing.T) {
	cfg := fast()
	cfg.Speed = 1
	urls, stop := serveUntil(t, cfg)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, urls[0]+"/v1/completions",
		strings.NewReader(`{"prompt":"x","max_tokens":100000,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if line, err := lines.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: {") {
		t.Fatalf("first line %q, %v", line, err)
	}
	stop()
	if rest, err := io.ReadAll(lines); err == nil || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the stream ended with %v after %d bytes, want it cut", err, len(rest))
	}
}

func TestRunWantsAListenerPerWorker(t *testing.T) {
	cfg := fast()
	lns, err := sim.Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Count = 2
	s, err := sim.New(cfg, discard())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context(), lns); err == nil {
		t.Error("Run with 1 listener for 2 workers = nil, want an error")
	}
	if _, err := lns[0].Accept(); err == nil {
		t.Error("the listener is open")
	}
}

func TestListenFailure(t *testing.T) {
	cfg := fast()
	lns, err := sim.Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer lns[0].Close()
	if _, err := fmt.Sscanf(lns[0].Addr().String(), "127.0.0.1:%d", &cfg.Port); err != nil {
		t.Fatal(err)
	}
	if _, err := sim.Listen(cfg); err == nil {
		t.Error("Listen on a port in use = nil, want an error")
	}
}

func TestEmbeddings(t *testing.T) {
	url := serve(t, fast())[0]
	_, data := post(t, url+"/v1/embeddings", `{"input":["one text","two texts","one text"],"dimensions":16}`)
	r := decode[struct {
		Object string
		Data   []struct {
			Index     int
			Embedding []float64
		}
		Usage usage
	}](t, data)
	if r.Object != "list" || len(r.Data) != 3 || r.Usage.Prompt != 2+3+2 || r.Usage.Output != 0 {
		t.Fatalf("got %s", data)
	}
	sum := 0.0
	for _, x := range r.Data[0].Embedding {
		sum += x * x
	}
	if len(r.Data[0].Embedding) != 16 || math.Abs(sum-1) > 1e-5 {
		t.Errorf("embedding %v has length %v, want 1", r.Data[0].Embedding, sum)
	}
	same := func(i, j int) bool { return fmt.Sprint(r.Data[i].Embedding) == fmt.Sprint(r.Data[j].Embedding) }
	if !same(0, 2) || same(0, 1) {
		t.Errorf("embeddings of equal texts differ or those of different ones do not: %s", data)
	}
	_, data = post(t, url+"/v1/embeddings", `{"input":"one text","encoding_format":"base64"}`)
	if p := decode[struct{ Data []struct{ Embedding string } }](t, data); len(p.Data) != 1 || len(p.Data[0].Embedding) != (64*4+2)/3*4 {
		t.Errorf("base64: %s", data)
	}
}

func TestMetrics(t *testing.T) {
	cfg := ranks(fast(), 2)
	cfg.Model, cfg.Speed, cfg.MaxNumSeqs = `a"b\c`, 1, 1
	url := serve(t, cfg)[0]
	post(t, url+"/v1/completions", `{"prompt":"`+strings.Repeat("abcd", 40)+`","max_tokens":1}`, "X-Data-Parallel-Rank", "1")
	post(t, url+"/v1/completions", `{"prompt":"`+strings.Repeat("abcd", 40)+`","max_tokens":1}`, "X-Data-Parallel-Rank", "1")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
			strings.NewReader(`{"prompt":"`+strings.Repeat("x", 4*4096)+`","max_tokens":50000,"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Data-Parallel-Rank", "0")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
	}
	_, data := get(t, url+"/metrics")
	for _, want := range []string{
		`vllm:num_requests_running{engine="0",model_name="a\"b\\c"} 1`,
		`vllm:num_requests_waiting{engine="0",model_name="a\"b\\c"} 1`,
		`vllm:num_requests_running{engine="1",model_name="a\"b\\c"} 0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="a\"b\\c"} 0.03125`, // 256 of 8192, while it is prefilled
		`vllm:kv_cache_usage_perc{engine="1",model_name="a\"b\\c"} 0`,       // cached blocks do not count
		`vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="1",num_gpu_blocks="16384"} 1`,
		`vllm:prefix_cache_queries_total{engine="1",model_name="a\"b\\c"} 80`,
		`vllm:prefix_cache_hits_total{engine="1",model_name="a\"b\\c"} 32`,
		`vllm:prompt_tokens_total{engine="1",model_name="a\"b\\c"} 80`,
		`vllm:generation_tokens_total{engine="1",model_name="a\"b\\c"} 2`,
		`vllm:num_preemptions_total{engine="1",model_name="a\"b\\c"} 0`,
		`vllm:request_prompt_tokens_sum{engine="1",model_name="a\"b\\c"} 80`,
		`vllm:request_prompt_tokens_count{engine="1",model_name="a\"b\\c"} 2`,
		`vllm:request_prompt_tokens_bucket{engine="1",model_name="a\"b\\c",le="50.0"} 2`,
		`vllm:request_prompt_tokens_bucket{engine="1",model_name="a\"b\\c",le="20.0"} 0`,
		"process_start_time_seconds 1",
	} {
		if !strings.Contains("\n"+string(data), "\n"+want) {
			t.Errorf("the page lacks %s", want)
		}
	}
	if t.Failed() {
		t.Log(string(data))
	}
}

func TestStatsAfterWork(t *testing.T) {
	url := serve(t, fast())[0]
	post(t, url+"/v1/completions", `{"prompt":"`+strings.Repeat("abcd", 40)+`","max_tokens":30}`)
	s := statsOf(t, url)
	if s.Steps != 29 || s.Generated != 30 || s.Computed != 40 || s.Finished != 1 || s.Cut+s.Lost+s.Late+s.Aborted != 0 {
		t.Errorf("stats = %+v, want 29 steps, 30 tokens, 40 computed, 1 finished", s)
	}
	// No timer fires before its time, or at it.
	if l := s.StepMillis; !(l.P50 > 0 && l.P50 <= l.P99 && l.P99 <= l.Max) {
		t.Errorf("lateness = %+v", l)
	}
}

// A rank is free again when its sequence has ended, so requests one after the other meet no
// load and go to the first.
func TestEndedSequencesAreNoLoad(t *testing.T) {
	url := serve(t, ranks(fast(), 2))[0]
	for range 3 {
		post(t, url+"/v1/completions", `{"prompt":"x","max_tokens":1}`)
	}
	for dp, want := range []uint64{3, 0} {
		if got := statsOf(t, url).Workers[0].Ranks[dp].Finished; got != want {
			t.Errorf("rank %d finished %d, want %d", dp, got, want)
		}
	}
}
