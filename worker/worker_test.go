package worker_test

import (
	"reflect"
	"strings"
	"testing"

	"spillway/worker"
)

func TestNormalize(t *testing.T) {
	for _, tt := range []struct {
		name  string
		given worker.Worker
		want  worker.Worker
	}{
		{"url only", worker.Worker{Endpoint: "http://gpu1:8000"}, worker.Worker{
			ID: worker.DefaultID("http://gpu1:8000"), Name: "gpu1:8000", Endpoint: "http://gpu1:8000", Tenant: "default",
			Engine: "auto", MetricsURL: "http://gpu1:8000/metrics", RankRouting: worker.RankBySpillway,
		}},
		{"a path and slashes", worker.Worker{Endpoint: "https://h/llm//"}, worker.Worker{
			ID: worker.DefaultID("https://h/llm"), Name: "h/llm", Endpoint: "https://h/llm", Tenant: "default",
			Engine: "auto", MetricsURL: "https://h/llm/metrics", RankRouting: worker.RankBySpillway,
		}},
		{"all given", worker.Worker{
			ID: 1<<63 + 5, Name: "w", Endpoint: "http://[::1]:9", Models: []string{"m", "m-lora"}, Tenant: "t", Engine: "vllm",
			MetricsURL: "http://x/m", APIKey: "k", DPStart: 4, DPSize: 4, RankRouting: worker.RankByEngine, KVTotalBlocks: 1, BlockSize: 32,
		}, worker.Worker{
			ID: 1<<63 + 5, Name: "w", Endpoint: "http://[::1]:9", Models: []string{"m", "m-lora"}, Tenant: "t", Engine: "vllm",
			MetricsURL: "http://x/m", APIKey: "k", DPStart: 4, DPSize: 4, RankRouting: worker.RankByEngine, KVTotalBlocks: 1, BlockSize: 32,
		}},
	} {
		got, err := tt.given.Normalize()
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: Normalize(%+v) = %+v, %v, want %+v", tt.name, tt.given, got, err, tt.want)
		}
		if again, err := got.Normalize(); err != nil || !reflect.DeepEqual(again, got) {
			t.Errorf("%s: Normalize twice = %+v, %v, want %+v", tt.name, again, err, got)
		}
	}
}

// TestNormalizeRefuses: each error begins with the key that is to blame.
func TestNormalizeRefuses(t *testing.T) {
	ok := worker.Worker{Endpoint: "http://h:1"}
	for _, tt := range []struct {
		key    string
		change func(*worker.Worker)
	}{
		{"url: ", func(w *worker.Worker) { w.Endpoint = "" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "h:1" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "tcp://h:1" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "http://" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "http://h:x" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "http://h/?a=b" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "http://h/#a" }},
		{"url: ", func(w *worker.Worker) { w.Endpoint = "http://user:secret@h" }},
		{"engine: ", func(w *worker.Worker) { w.Engine = "vLLM" }},
		{"rank_routing: ", func(w *worker.Worker) { w.RankRouting = "me" }},
		{"dp_size: ", func(w *worker.Worker) { w.DPSize = worker.MaxDPSize + 1 }},
		{"dp_start: ", func(w *worker.Worker) { w.DPStart = 4 }},
		{"dp_start: ", func(w *worker.Worker) { w.DPStart, w.DPSize = worker.AnyDP, 1 }},
		{"dp_start: ", func(w *worker.Worker) { w.DPStart, w.DPSize = worker.AnyDP-1, 2 }},
		{"models: ", func(w *worker.Worker) { w.Models = []string{"m", ""} }},
		{"kv_events_endpoint: ", func(w *worker.Worker) { w.KVEventsEndpoint = "h:1" }},
		{"kv_events_endpoints: ", func(w *worker.Worker) { w.KVEvents = map[uint32]string{0: ""} }},
		{"kv_events_endpoints: ", func(w *worker.Worker) { w.KVEvents = map[uint32]string{worker.AnyDP: "tcp://h:1"} }},
		{"replay_endpoint: ", func(w *worker.Worker) { w.ReplayEndpoint = "tcp://*:1" }},
		{"replay_endpoints: ", func(w *worker.Worker) { w.KVReplay = map[uint32]string{0: "udp://h:1"} }},
	} {
		w := ok
		tt.change(&w)
		if _, err := w.Normalize(); err == nil || !strings.HasPrefix(err.Error(), tt.key) || strings.Contains(err.Error(), "secret") {
			t.Errorf("Normalize(%+v) = %v, want an error that begins with %s", w, err, tt.key)
		}
	}
	for _, change := range []func(*worker.Worker){
		func(w *worker.Worker) {},
		func(w *worker.Worker) { w.DPSize = worker.MaxDPSize },
		func(w *worker.Worker) { w.DPStart, w.DPSize = worker.AnyDP-1, 1 }, // the highest rank there is
	} {
		w := ok
		change(&w)
		if _, err := w.Normalize(); err != nil {
			t.Errorf("Normalize(%+v) = %v, want nil", w, err)
		}
	}
}

func TestDefaultID(t *testing.T) {
	seen := map[worker.ID]string{}
	for _, url := range []string{"http://a:1", "http://a:2", "http://b:1", "https://a:1"} {
		id := worker.DefaultID(url)
		if id>>63 != 0 || seen[id] != "" || worker.DefaultID(url) != id {
			t.Errorf("DefaultID(%s) = %d, want the top bit clear, unique and stable", url, uint64(id))
		}
		seen[id] = url
	}
	if got := worker.ID(1<<64 - 1).String(); got != "18446744073709551615" {
		t.Errorf("String() = %s, want decimal", got)
	}
}
