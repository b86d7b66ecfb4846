package monitor_test

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"spillway/monitor"
)

func TestScan(t *testing.T) {
	for _, tt := range []struct {
		page      string
		want      string
		malformed int
	}{
		{"a 1\n", "a[] 1", 0},
		{"a{} 1\n", "a[] 1", 0},
		{"  a\t{ x = \"1\" , y=\"2\", }\t 1 123\n", "a[x:1 y:2] 1", 0},
		{`a{x="}{,=\n\\\" #"} 1` + "\n", "a[x:}{,=\n\\\" #] 1", 0},
		{"# a 1\n#a\n\n \na 1\n", "a[] 1", 0},
		{"aa 1\nb 2\nbucket{le=\"a\"} 3\n", "b[] 2", 0},
		{"a NaN\na +Inf\na -Inf\na 1e3\n", "a[] NaN, a[] +Inf, a[] -Inf, a[] 1000", 0},
		{"a\na \na x\na 1_0\na 0x1p2\n", "", 5},
		{"a{ 1\na{x} 1\na{x=1} 1\na{x=\"1} 1\na{x=\"1\" y=\"2\"} 1\na{x=\"\\q\"} 1\na{x\n", "", 7},
		{"a{x=\"1\"", "", 0},
		{"a 1\r\n", "", 1},
	} {
		lines, malformed := monitor.Scan([]byte(tt.page), []string{"a", "b"}, []string{"x", "y"})
		var out []string
		for _, l := range lines {
			out = append(out, fmt.Sprintf("%s%s %v", l.Name, strings.TrimPrefix(fmt.Sprint(l.Labels), "map"), l.Value))
		}
		if got := strings.Join(out, ", "); got != tt.want || malformed != tt.malformed {
			t.Errorf("Scan(%q) = %q, %d malformed, want %q, %d", tt.page, got, malformed, tt.want, tt.malformed)
		}
	}
}

// FuzzScan compares the scanner with a full parser on every page that this accepts.
func FuzzScan(f *testing.F) {
	for _, s := range []string{
		"a 1\n", "a{x=\"1\",y=\"a}\\\"b\"} 8.34e-05 17\n", "# TYPE b gauge\nb{y=\"\\n\"} NaN\nc{x=\"1\"} +Inf\n",
		"a{} 1\na {x=\"1\",} 2\n", "a\"\"0\n", "a{ }0\n{}0\na{ }0\n", vllmPage(1, 1),
	} {
		f.Add([]byte(s))
	}
	names := []string{"a", "b", "c", "vllm:kv_cache_usage_perc", "vllm:num_requests_running"}
	labels := []string{"x", "y", "engine", "model_name"}
	f.Fuzz(func(t *testing.T, body []byte) {
		lines, malformed := monitor.Scan(body, names, labels)
		families, err := parseAll(body)
		if err != nil || oddName(body) {
			return
		}
		if malformed > 0 {
			t.Fatalf("%q: %d lines called malformed, expfmt accepts all", body, malformed)
		}
		var got, want []string
		skip := map[string]bool{} // parts of histograms and summaries are folded by expfmt
		for name, mf := range families {
			switch mf.GetType() {
			case dto.MetricType_HISTOGRAM, dto.MetricType_SUMMARY, dto.MetricType_GAUGE_HISTOGRAM:
				for _, part := range []string{"", "_sum", "_count", "_bucket"} {
					skip[name+part] = true
				}
			}
		}
		for name, mf := range families {
			if skip[name] || !slices.Contains(names, name) {
				continue
			}
			for _, m := range mf.GetMetric() {
				l := monitor.Line{Name: name, Labels: map[string]string{}, Value: valueOf(m)}
				for _, p := range slices.Backward(m.GetLabel()) { // the first of a repeated label
					if slices.Contains(labels, p.GetName()) {
						l.Labels[p.GetName()] = p.GetValue()
					}
				}
				want = append(want, text(l))
			}
		}
		for _, l := range lines {
			if !skip[l.Name] {
				got = append(got, text(l))
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("page %q\n got %q\nwant %q", body, got, want)
		}
	})
}

// oddName tells whether a line has a quote before any brace, or no name at all. expfmt reads a
// name in quotes there, or takes the name of the line before; the format has neither, and the
// scanner is right to find no sample in such a line.
func oddName(body []byte) bool {
	for line := range bytes.Lines(body) {
		line = bytes.TrimLeft(line, " \t")
		brace := bytes.IndexByte(line, '{')
		if quote := bytes.IndexByte(line, '"'); brace == 0 || quote >= 0 && (brace < 0 || quote < brace) {
			return true
		}
	}
	return false
}

// parseAll is the slow, obvious way. A panic of the parser, as on a line without a name, is
// one more way to refuse a page.
func parseAll(body []byte) (families map[string]*dto.MetricFamily, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	return parser.TextToMetricFamilies(bytes.NewReader(body))
}

func valueOf(m *dto.Metric) float64 {
	switch {
	case m.Gauge != nil:
		return m.Gauge.GetValue()
	case m.Counter != nil:
		return m.Counter.GetValue()
	}
	return m.Untyped.GetValue()
}

func text(l monitor.Line) string {
	return fmt.Sprintf("%s%q %x", l.Name, l.Labels, math.Float64bits(l.Value+0))
}

// FuzzPage feeds whole pages to the reader: whatever comes, samples stay usable.
func FuzzPage(f *testing.F) {
	f.Add(vllmPage(2, 3), vllmPage(1, 1))
	f.Fuzz(func(t *testing.T, first, second string) {
		r := monitor.Reader{Estimate: true}
		for _, p := range []string{first, second} {
			samples, _, _, _ := r.Read(p, epoch)
			for i, s := range samples {
				if i > 0 && s.Rank.DP <= samples[i-1].Rank.DP {
					t.Fatalf("ranks out of order: %s", show(samples))
				}
				if v := s.KVUsageRatio; v != nil && !(*v >= 0 && *v <= math.MaxFloat64) {
					t.Fatalf("ratio %v", *v)
				}
				if s.KVTotalBlocks != nil && *s.KVTotalBlocks == 0 {
					t.Fatal("a capacity of 0 was handed on")
				}
			}
		}
	})
}

// vllmPage is a page as a vLLM server writes it: the wanted gauges among many histograms.
func vllmPage(engines, histograms int) string {
	var b strings.Builder
	for h := range histograms {
		fmt.Fprintf(&b, "# HELP vllm:histogram_%d_seconds Histogram of something in seconds.\n# TYPE vllm:histogram_%d_seconds histogram\n", h, h)
		for e := range engines {
			labels := fmt.Sprintf(`engine="%d",model_name="Qwen/Qwen3-0.6B"`, e)
			for le := range 20 {
				fmt.Fprintf(&b, "vllm:histogram_%d_seconds_bucket{%s,le=\"%g\"} %d.0\n", h, labels, 0.001*float64(int(1)<<le), le*37)
			}
			fmt.Fprintf(&b, "vllm:histogram_%d_seconds_count{%s} 740.0\nvllm:histogram_%d_seconds_sum{%s} 8121.25\n", h, labels, h, labels)
		}
	}
	for _, name := range []string{"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"} {
		fmt.Fprintf(&b, "# HELP vllm:%s Gauge.\n# TYPE vllm:%s gauge\n", name, name)
		for e := range engines {
			fmt.Fprintf(&b, "vllm:%s{engine=\"%d\",model_name=\"Qwen/Qwen3-0.6B\"} 0.5\n", name, e)
		}
	}
	for e := range engines {
		fmt.Fprintf(&b, "vllm:prompt_tokens_total{engine=\"%d\",model_name=\"Qwen/Qwen3-0.6B\"} 123456.0\n", e)
		fmt.Fprintf(&b, "vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"%d\",num_gpu_blocks=\"%d\",sliding_window=\"None\"} 1.0\n", e, 1000*engines)
	}
	b.WriteString("process_start_time_seconds 1.7e+09\n")
	return b.String()
}

func TestScanAllocatesNothing(t *testing.T) {
	page := []byte(vllmPage(2, 20))
	if n := testing.AllocsPerRun(20, func() { monitor.Skim(page) }); n > 0 {
		t.Errorf("scanning a page allocates %v times, want 0", n)
	}
}

// The two ways to read a page of 30 histograms, some 700 lines.
func BenchmarkPage(b *testing.B) {
	page := vllmPage(1, 30)
	b.Run("scan", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		b.ReportAllocs()
		body := []byte(page)
		for b.Loop() {
			monitor.Skim(body)
		}
	})
	b.Run("samples", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		b.ReportAllocs()
		var r monitor.Reader
		for b.Loop() {
			r.Read(page, epoch)
		}
	})
	b.Run("expfmt", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		b.ReportAllocs()
		for b.Loop() {
			parser := expfmt.NewTextParser(model.LegacyValidation)
			if _, err := parser.TextToMetricFamilies(strings.NewReader(page)); err != nil {
				b.Fatal(err)
			}
		}
	})
}
