package monitor_test

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"

	"spillway/busy"
	"spillway/monitor"
	"spillway/worker"
)

// Rows 12 to 17 and their neighbours: pages of other engines.
func TestOtherPages(t *testing.T) {
	custom := func(c worker.Custom) worker.Worker { return worker.Worker{Engine: "custom", Custom: c} }
	trt := worker.Worker{Engine: "trtllm"}
	for _, tt := range []struct {
		name    string
		worker  worker.Worker
		server  string // answer to /get_server_info
		at      int    // place; 2 is /v1/loads
		page    string
		want    string
		invalid bool
	}{
		{name: "12 tensor ranks repeat", page: `sglang:token_usage{model_name="m",tp_rank="0"} 0.4
sglang:token_usage{model_name="m",tp_rank="1"} 0.4
sglang:token_usage{model_name="m",tp_rank="2"} 0.4
sglang:token_usage{model_name="m",tp_rank="3"} 0.4
sglang:num_running_reqs{model_name="m",tp_rank="0"} 7
sglang:num_running_reqs{model_name="m",tp_rank="1"} 7
sglang:num_running_reqs{model_name="m",tp_rank="2"} 7
sglang:num_running_reqs{model_name="m",tp_rank="3"} 7
`, want: "0: U=- T=- ratio=0.4 run=7 wait=-"},
		{name: "13 data-parallel ranks", page: `sglang:token_usage{dp_rank="0"} 0.9
sglang:token_usage{dp_rank="1"} 0.1
`, want: "0: U=- T=- ratio=0.9; 1: U=- T=- ratio=0.1"},
		{name: "14 tokens and pages", page: `sglang:kv_used_tokens 1000
sglang:page_size 64
sglang:num_pages 100
`, want: "0: U=16 T=100 ratio=- block=64"},
		{name: "14 used tokens win over the ratio", page: `sglang:token_usage 0.5
sglang:kv_used_tokens 1000
sglang:num_used_tokens 3000
sglang:page_size 64
sglang:num_pages 100
`, want: "0: U=16 T=100 ratio=0.5 block=64"},
		{name: "14 the older name", page: `sglang:num_used_tokens 1000
sglang:max_total_num_tokens 6400
sglang:page_size 64
`, want: "0: U=16 T=100 ratio=0.15625 block=64"},
		{name: "15 capacity in labels", page: `sglang:token_usage 0.5
sglang:cache_config_info{page_size="1",num_pages="50000"} 1
`, want: "0: U=25000 T=50000 ratio=0.5 block=1"},
		{name: "15 not divided by ranks", page: `sglang:token_usage{dp_rank="0"} 0.5
sglang:token_usage{dp_rank="1"} 0.5
sglang:cache_config_info{dp_rank="0",page_size="1",num_pages="50000"} 1
sglang:cache_config_info{dp_rank="1",page_size="1",num_pages="50000"} 1
`, want: "0: U=25000 T=50000 ratio=0.5 block=1; 1: U=25000 T=50000 ratio=0.5 block=1"},
		{name: "16 underscore", page: `sglang_token_usage{dp_rank="0"} 0.5
sglang_num_queue_reqs{dp_rank="0"} 2
`, want: "0: U=- T=- ratio=0.5 run=- wait=2"},
		{name: "16 the prefix of token_usage is the page's", page: `sglang:num_queue_reqs 9
sglang_token_usage 0.5
sglang_num_queue_reqs 2
`, want: "0: U=- T=- ratio=0.5 run=- wait=2"},
		{name: "a fuller pool than that of the blocks", page: `sglang:token_usage 0.9
sglang:full_token_usage 0.1
sglang:kv_used_tokens 640
sglang:page_size 64
sglang:num_pages 100
`, want: "0: U=90 T=100 ratio=0.9 block=64"},
		{name: "a sliding-window pool", page: `sglang:token_usage 0.3
sglang:swa_token_usage 0.3
sglang:kv_used_tokens 640
sglang:page_size 64
sglang:num_pages 100
`, want: "0: U=30 T=100 ratio=0.3 block=64"},
		{name: "queues add up, models too, priorities do not", page: `sglang:token_usage 0
sglang:num_queue_reqs{model_name="a",priority=""} 3
sglang:num_queue_reqs{model_name="a",priority="1"} 2
sglang:num_queue_reqs{model_name="b"} 1
sglang:num_prefill_prealloc_queue_reqs{model_name="a"} 10
sglang:num_decode_transfer_queue_reqs{model_name="a"} 100
`, want: "0: U=- T=- ratio=0 run=- wait=114"},
		{name: "page size by the server", server: `{"page_size":16,"max_prefill_tokens":16384}`,
			page: "sglang:num_used_tokens 17\nsglang:max_total_num_tokens 160\n", want: "0: U=2 T=10 ratio=0.10625 block=16 M=16384"},
		{name: "M by the pool", server: `{"max_total_num_tokens":5000}`, page: "sglang:token_usage 0.5\n", want: "0: U=- T=- ratio=0.5 M=5000"},
		{name: "M by the page", server: `{}`, page: "sglang:token_usage 0.5\nsglang:max_total_num_tokens 6000\n", want: "0: U=- T=- ratio=0.5 M=6000"},
		{name: "a rank that is none", page: "sglang:token_usage{dp_rank=\"x\"} 1\nsglang:token_usage{dp_rank=\"1\"} 0.5\n",
			want: "1: U=- T=- ratio=0.5", invalid: true},
		{name: "NaN", page: "sglang:token_usage NaN\n", want: "", invalid: true},
		{name: "numbers too large", page: "sglang:token_usage 0.5\nsglang:kv_used_tokens 1e300\nsglang:num_pages -1\n",
			want: "0: U=- T=- ratio=0.5", invalid: true},

		{name: "loads", at: 2, page: `{"timestamp":"x","dp_rank_count":2,"loads":[
 {"dp_rank":1,"num_running_reqs":3,"num_waiting_reqs":4,"num_waiting_uncached_tokens":500,"num_total_reqs":7,"num_used_tokens":100,"max_total_num_tokens":1000,"token_usage":0.1,"memory":{"x":[1]}},
 {"dp_rank":0,"num_running_reqs":0,"num_waiting_reqs":0,"num_waiting_uncached_tokens":0,"num_used_tokens":0,"max_total_num_tokens":0,"token_usage":0.7}]}`,
			want: "0: U=- T=- ratio=0.7 run=0 wait=0 P=0; 1: U=- T=- ratio=0.1 run=3 wait=4 P=500"},
		{name: "loads in blocks", at: 2, server: `{"page_size":10,"max_prefill_tokens":8192}`,
			page: `{"loads":[{"num_used_tokens":101,"max_total_num_tokens":1000,"token_usage":0.1}]}`,
			want: "0: U=11 T=100 ratio=0.1 block=10 M=8192"},
		{name: "loads that leave out memory", at: 2, server: `{"page_size":10}`, worker: worker.Worker{Engine: "auto", Endpoint: "http://w", MetricsURL: "http://w/metrics", KVTotalBlocks: 100},
			page: `{"loads":[{"num_used_tokens":0,"max_total_num_tokens":0,"token_usage":0.7}]}`, want: "0: U=70 T=100 ratio=0.7 block=10"},
		{name: "loads that make no sense", at: 2, page: `{"loads":[{"dp_rank":-1},{"dp_rank":0.5},{"dp_rank":4294967295},{"token_usage":-1,"num_running_reqs":-1,"num_waiting_reqs":1},{"dp_rank":0,"token_usage":0.5}]}`,
			want: "0: U=- T=- ratio=- run=- wait=1", invalid: true},
		{name: "loads of another shape", at: 2, page: `{"loads":{"a":1}}`, want: "", invalid: true},
		{name: "loads cut short", at: 2, page: `{"loads":[{"token_usage":0.5}`, want: "", invalid: true},
		{name: "loads in HTML", at: 2, page: `<html>`, want: ""},

		{name: "17 TensorRT-LLM", at: 1, page: `trtllm_kv_cache_utilization{model_name="m"} 0.25
trtllm_kv_cache_max_blocks{model_name="m"} 1000
trtllm_kv_cache_tokens_per_block{model_name="m"} 32
trtllm_num_requests_running{model_name="m"} 3
trtllm_num_requests_waiting{model_name="m"} 4
`, want: "0: U=250 T=1000 ratio=0.25 run=3 wait=4 block=32"},
		{name: "17 without a prefix", worker: trt, page: "kv_cache_utilization 0.25\nkv_cache_max_blocks 1000\nnum_requests_running 3\n",
			want: "0: U=250 T=1000 ratio=0.25 run=3 wait=-"},
		{name: "17 both", worker: trt, page: "kv_cache_utilization 0.25\ntrtllm_kv_cache_utilization 0.25\nnum_requests_running 3\ntrtllm_num_requests_running 3\n",
			want: "0: U=- T=- ratio=0.25 run=3 wait=-"},
		{name: "17 Triton", page: `nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 500
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 101
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="m",version="1"} 399
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64
nv_trt_llm_request_metrics{request_type="scheduled",model="m"} 5
nv_trt_llm_request_metrics{request_type="waiting",model="m"} 6
nv_trt_llm_request_metrics{request_type="max",model="m"} 512
`, want: "0: U=101 T=500 ratio=0.2 run=5 wait=6 block=64"},

		{name: "custom fraction", worker: custom(worker.Custom{KVUsage: `use{tier="gpu"}`, RankLabel: "r", Running: "n{kind=run}", Waiting: "n{kind=wait}", PrefillTokens: "p"}),
			page: `use{tier="gpu",r="0"} 0.1
use{tier="cpu",r="0"} 0.9
use{tier="gpu",r="2"} 0.2
n{kind="run",r="2"} 1
n{kind="wait",r="2"} 2
p{r="2"} 300
`, want: "0: U=- T=- ratio=0.1; 2: U=- T=- ratio=0.2 run=1 wait=2 P=300"},
		{name: "custom blocks", worker: custom(worker.Custom{KVUsedBlocks: "used", CacheInfo: "info", NumBlocksLabel: "n", BlockSizeLabel: "b"}),
			page: "used 30\ninfo{n=\"100\",b=\"8\"} 1\n", want: "0: U=30 T=100 ratio=- block=8"},
		{name: "custom blocks, repeated", worker: custom(worker.Custom{KVUsedBlocks: "used", KVTotalBlocks: "total"}),
			page: "used{tp=\"0\"} 30\nused{tp=\"1\"} 20\ntotal{tp=\"0\"} 100\ntotal{tp=\"1\"} 99\n", want: "0: U=30 T=100 ratio=-"},
		{name: "custom tokens", worker: custom(worker.Custom{KVUsedTokens: "used", KVTotalTokens: "total", BlockSize: "size"}),
			page: "used 33\ntotal 100\nsize 16\n", want: "0: U=3 T=7 ratio=0.33 block=16"},
		{name: "custom tokens, no size", worker: custom(worker.Custom{KVUsedTokens: "used", KVTotalTokens: "total"}),
			page: "used 33\ntotal 100\n", want: "0: U=- T=- ratio=0.33"},
		{name: "custom, a label that must be missing", worker: custom(worker.Custom{KVUsage: `use{tier=""}`}),
			page: "use{tier=\"cpu\"} 0.9\nuse 0.1\n", want: "0: U=- T=- ratio=0.1"},
		{name: "custom, without a rank label all is one", worker: custom(worker.Custom{KVUsage: "use"}),
			page: "use{r=\"1\"} 0.9\nuse{r=\"2\"} 0.1\n", want: "0: U=- T=- ratio=0.9"},

		{name: "vLLM among others", page: "vllm:kv_cache_usage_perc 0.5\nhttp_requests_total 1\n", want: "0: U=- T=- ratio=0.5"},
		{name: "nobody's", page: "kv_cache_utilization 0.5\nprocess_start_time_seconds 1000\n", want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := monitor.Reader{Worker: tt.worker, At: tt.at, Server: tt.server}
			samples, _, invalid, _ := r.Read(tt.page, epoch)
			got := show(samples)
			for i := range samples {
				if m := samples[i].MaxNumBatchedTokens; m != nil {
					got += fmt.Sprintf(" M=%d", *m)
				}
			}
			if got != tt.want || invalid != tt.invalid {
				t.Errorf("page\n%sgives %q, invalid %v\nwant %q, invalid %v", tt.page, got, invalid, tt.want, tt.invalid)
			}
		})
	}
}

// server answers by path, and remembers what was asked.
type server struct {
	mu    sync.Mutex
	pages map[string]string // those that begin with { or [ are JSON
	asked map[string]int
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked[r.URL.Path]++
	page, ok := s.pages[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	if strings.HasPrefix(page, "{") || strings.HasPrefix(page, "[") {
		w.Header().Set("Content-Type", "application/json")
	}
	io.WriteString(w, page)
}

func (s *server) set(pages map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pages = pages
}

func (s *server) count(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[path]
}

func TestEngineDetection(t *testing.T) {
	const vllm, sglang, trt = goodPage, "sglang:token_usage 0.5\nsglang:num_pages 100\n", "trtllm_kv_cache_utilization 0.9\ntrtllm_kv_cache_max_blocks 10\n"
	const loads = `{"loads":[{"token_usage":0.9,"num_used_tokens":900,"max_total_num_tokens":1000}]}`
	const iterations = `[{"kvCacheStats":{"usedNumBlocks":1,"maxNumBlocks":100}}]`
	for _, tt := range []struct {
		name   string
		engine string
		pages  map[string]string
		want   string
		never  string // path that must not be asked
		once   string // path that must be asked once only
		log    string
	}{
		{name: "vLLM", pages: map[string]string{"/metrics": vllm}, want: "busy r0 870/1000", never: "/prometheus/metrics"},
		{name: "SGLang", pages: map[string]string{"/metrics": sglang}, want: "free r0 50/100", never: "/v1/loads"},
		{name: "17 TensorRT-LLM found", pages: map[string]string{"/metrics": iterations, "/prometheus/metrics": trt}, want: "busy r0 9/10", once: "/metrics"},
		{name: "17 TensorRT-LLM named", engine: "trtllm", pages: map[string]string{"/metrics": iterations, "/prometheus/metrics": trt}, want: "busy r0 9/10", never: "/metrics"},
		{name: "TensorRT-LLM without JSON", pages: map[string]string{"/prometheus/metrics": trt}, want: "busy r0 9/10"},
		{name: "SGLang without metrics", pages: map[string]string{"/v1/loads": loads}, want: "busy r0 0.9", once: "/metrics", log: "--enable-metrics"},
		{name: "SGLang without metrics, named", engine: "sglang", pages: map[string]string{"/v1/loads": loads, "/get_server_info": `{"page_size":10}`},
			want: "busy r0 90/100", never: "/prometheus/metrics", log: "--enable-metrics"},
		{name: "nothing anywhere", pages: nil, want: "unknown r0", log: "--enable-metrics"},
		{name: "vLLM named, SGLang there", engine: "vllm", pages: map[string]string{"/metrics": sglang}, want: "unknown r0", log: "has no vllm:kv_cache_usage_perc"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &server{pages: tt.pages, asked: map[string]int{}}
			srv := serve(s.ServeHTTP)
			t.Cleanup(srv.Close)
			r := newRig(fast(), busy.Thresholds{DecodeFrac: new(0.85)})
			w := r.add(t, worker.Worker{Endpoint: srv.URL, Engine: tt.engine})
			stop := r.run(t)
			eventually(t, tt.want, func() bool { return r.status(w.ID) == tt.want })
			total := func() (n int) {
				s.mu.Lock()
				defer s.mu.Unlock()
				for _, c := range s.asked {
					n += c
				}
				return n
			}
			before := total()
			eventually(t, "five more looks", func() bool { return total() >= before+5 })
			stop()
			if got := r.status(w.ID); got != tt.want {
				t.Errorf("later it is %q, want %q", got, tt.want)
			}
			if tt.never != "" && s.count(tt.never) != 0 {
				t.Errorf("%s was asked for", tt.never)
			}
			if tt.once != "" && s.count(tt.once) != 1 {
				t.Errorf("%s was asked for %d times, want 1", tt.once, s.count(tt.once))
			}
			if tt.log != "" && r.log.count(tt.log) != 1 {
				t.Errorf("%q is logged %d times, want once:\n%s", tt.log, r.log.count(tt.log), &r.log.buf)
			}
		})
	}
}

// Another engine behind the same URL is found out after three pages.
func TestEngineChanges(t *testing.T) {
	s := &server{pages: map[string]string{"/metrics": goodPage}, asked: map[string]int{}}
	srv := serve(s.ServeHTTP)
	t.Cleanup(srv.Close)
	r := newRig(fast(), busy.Thresholds{})
	w := r.add(t, worker.Worker{Endpoint: srv.URL, Name: "w"})
	r.run(t)
	for _, step := range []struct {
		pages map[string]string
		want  string
	}{
		{map[string]string{"/metrics": goodPage}, "free r0 870/1000"},
		{map[string]string{"/metrics": "sglang:token_usage 0.5\nsglang:num_pages 100\n"}, "free r0 50/100"},
		{map[string]string{"/v1/loads": `{"loads":[{"token_usage":0.25}]}`}, "free r0 25/100"}, // capacity is remembered
		{map[string]string{"/metrics": goodPage}, "free r0 870/1000"},
	} {
		s.set(step.pages)
		eventually(t, step.want, func() bool { return r.status(w.ID) == step.want })
	}
	if n := r.errors(t, "w", "missing_metric"); n < 3 {
		t.Errorf("missing_metric counted %v times, want at least 3", n)
	}
}

// What an SGLang server tells of itself becomes M, and is asked for rarely.
func TestServerInfo(t *testing.T) {
	s := &server{pages: map[string]string{
		"/metrics": "sglang:token_usage 0.5\n", "/get_server_info": `{"max_prefill_tokens":16384,"page_size":1,"internal_states":[{}]}`,
	}, asked: map[string]int{}}
	srv := serve(s.ServeHTTP)
	t.Cleanup(srv.Close)
	r := newRig(fast(), busy.Thresholds{DecodeFrac: new(0.85)})
	w := r.add(t, worker.Worker{Endpoint: srv.URL})
	r.run(t)
	eventually(t, "M", func() bool {
		st := r.list.Workers(epoch)[0]
		return st.ID == w.ID && st.Ranks[0].Report.MaxBatchedTokens == 16384
	})
	before := s.count("/metrics")
	eventually(t, "more pages", func() bool { return s.count("/metrics") > before+5 })
	if n := s.count("/get_server_info"); n != 1 {
		t.Errorf("asked %d times, want once", n)
	}
}

// FuzzPages: whatever a worker answers, what reaches the busy list makes sense.
func FuzzPages(f *testing.F) {
	f.Add("sglang:token_usage{dp_rank=\"1\",priority=\"\"} 0.5\nsglang:kv_used_tokens 7\nsglang:cache_config_info{page_size=\"2\",num_pages=\"9\"} 1\n", uint8(0))
	f.Add("trtllm_kv_cache_utilization 0.5\nnv_trt_llm_request_metrics{request_type=\"waiting\"} 3\n", uint8(1))
	f.Add(`{"loads":[{"dp_rank":1,"num_used_tokens":5,"max_total_num_tokens":9,"token_usage":0.5}]}`, uint8(2))
	f.Add("u{r=\"3\"} 5\nt 6\nb 7\nn{a=\"b\"} 3\n", uint8(3))
	f.Fuzz(func(t *testing.T, body string, at uint8) {
		r := monitor.Reader{At: int(at % 3), Server: `{"page_size":3}`}
		if at%4 == 3 {
			r = monitor.Reader{Worker: worker.Worker{Engine: "custom", Custom: worker.Custom{
				KVUsedTokens: "u", KVTotalTokens: "t", BlockSize: "b", RankLabel: "r", Waiting: "n{a=b}",
			}}}
		}
		for range 2 {
			samples, _, _, _ := r.Read(body, epoch)
			last := int64(-1)
			for _, s := range samples {
				if ratio := s.KVUsageRatio; ratio != nil && !(*ratio >= 0 && *ratio <= math.MaxFloat64) {
					t.Errorf("ratio %v", *ratio)
				}
				for _, n := range []*uint64{s.KVUsedBlocks, s.KVTotalBlocks, s.Running, s.Waiting, s.BlockSize} {
					if n != nil && *n > 1<<60 {
						t.Errorf("%s: a number has become %d", show(samples), *n)
					}
				}
				if int64(s.Rank.DP) <= last || s.Rank.DP == worker.AnyDP {
					t.Errorf("%s: ranks are not in order", show(samples))
				}
				last = int64(s.Rank.DP)
			}
		}
	})
}
