package worker_test

import (
	"reflect"
	"strings"
	"testing"

	"spillway/worker"
)

func TestParseSeries(t *testing.T) {
	for _, tt := range []struct {
		text string
		want worker.Series
	}{
		{"kv_usage", worker.Series{Name: "kv_usage"}},
		{" a:b_9 ", worker.Series{Name: "a:b_9"}},
		{"m{}", worker.Series{Name: "m"}},
		{"m{a=b}", worker.Series{Name: "m", Labels: []worker.Label{{"a", "b"}}}},
		{`m { a = b c , d="e,}\"\\\n" , }`, worker.Series{Name: "m", Labels: []worker.Label{{"a", "b c"}, {"d", "e,}\"\\\n"}}}},
		{`m{a="",b=}`, worker.Series{Name: "m", Labels: []worker.Label{{"a", ""}, {"b", ""}}}},
	} {
		got, err := worker.ParseSeries(tt.text)
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("ParseSeries(%q) = %+v, %v, want %+v", tt.text, got, err, tt.want)
		}
	}
	for _, text := range []string{"", " ", "1a", "a-b", "{a=b}", "a{", "a{b}", "a{b=c", "a{b=c}d", "a{b=c}}", `a{b="c}`, `a{b="c" d="e"}`,
		"a{,}", "a{1=2}", "a{b:c=d}", `a{b=c"d"}`, `a{b="c\`, "a}", "a b", "sum(a)", `a{b!="c"}`, `a{b=~"c"}`} {
		if got, err := worker.ParseSeries(text); err == nil {
			t.Errorf("ParseSeries(%q) = %+v, want an error", text, got)
		}
	}
}

func TestCustom(t *testing.T) {
	for _, tt := range []struct {
		name   string
		engine string
		custom worker.Custom
		want   string // what the error begins with; "" for none
	}{
		{"a fraction", "custom", worker.Custom{KVUsage: "u"}, ""},
		{"blocks", "custom", worker.Custom{KVUsedBlocks: "u", KVTotalBlocks: "t", RankLabel: "dp"}, ""},
		{"tokens", "custom", worker.Custom{KVUsedTokens: "u", KVTotalTokens: "t", BlockSize: "b"}, ""},
		{"labels", "custom", worker.Custom{KVUsage: "u", CacheInfo: "i", BlockSizeLabel: "b", NumBlocksLabel: "n"}, ""},
		{"not said", "custom", worker.Custom{}, "custom: kv_usage: "},
		{"counts alone", "custom", worker.Custom{Running: "r"}, "custom: kv_usage: "},
		{"blocks of nothing", "custom", worker.Custom{KVUsedBlocks: "u"}, "custom: kv_used_blocks: "},
		{"tokens of nothing", "custom", worker.Custom{KVUsedTokens: "u", BlockSize: "b"}, "custom: kv_used_tokens: "},
		{"no series", "custom", worker.Custom{KVUsage: "u{"}, "custom: kv_usage: "},
		{"no label", "custom", worker.Custom{KVUsage: "u", RankLabel: "a:b"}, "custom: rank_label: "},
		{"info without labels", "custom", worker.Custom{KVUsage: "u", CacheInfo: "i"}, "custom: cache_info: "},
		{"labels without info", "custom", worker.Custom{KVUsage: "u", BlockSizeLabel: "i"}, "custom: cache_info: "},
		{"not asked for", "vllm", worker.Custom{KVUsage: "u"}, "custom: "},
		{"not asked for, auto", "", worker.Custom{KVUsage: "u"}, "custom: "},
	} {
		_, err := worker.Worker{Endpoint: "http://h:1", Engine: tt.engine, Custom: tt.custom}.Normalize()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)) {
			t.Errorf("%s: Normalize(engine %q, %+v) = %v, want %q", tt.name, tt.engine, tt.custom, err, tt.want)
		}
	}
	for _, engine := range []string{"auto", "vllm", "sglang", "trtllm"} {
		if w, err := (worker.Worker{Endpoint: "http://h:1", Engine: engine}).Normalize(); err != nil || w.Engine != engine {
			t.Errorf("Normalize(engine %q) = %q, %v", engine, w.Engine, err)
		}
	}
}

// FuzzParseSeries: what is accepted has names that a page can have, and means the same when it is
// written with quotes.
func FuzzParseSeries(f *testing.F) {
	for _, text := range []string{"a", "a{}", `a{b=c,d="e\"\\"}`, "a{b=}", "a{"} {
		f.Add(text)
	}
	quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := worker.ParseSeries(text)
		if err != nil {
			return
		}
		again := s.Name + "{"
		for _, l := range s.Labels {
			again += l.Name + `="` + quote.Replace(l.Value) + `",`
		}
		if got, err := worker.ParseSeries(again + "}"); err != nil || !reflect.DeepEqual(got, s) {
			t.Errorf("%q is %+v, written as %q it is %+v, %v", text, s, again, got, err)
		}
	})
}
