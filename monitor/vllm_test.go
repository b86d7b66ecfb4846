package monitor_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"spillway/busy"
	"spillway/monitor"
	"spillway/worker"
)

var epoch = time.Unix(1_700_000_000, 0)

// show writes samples as a row of a table would: rank, U/T, ratio, running+waiting, P.
func show(samples []busy.Sample) string {
	var out []string
	num := func(n *uint64) string {
		if n == nil {
			return "-"
		}
		return fmt.Sprint(*n)
	}
	for _, s := range samples {
		ratio := "-"
		if s.KVUsageRatio != nil {
			ratio = fmt.Sprint(*s.KVUsageRatio)
		}
		line := fmt.Sprintf("%d: U=%s T=%s ratio=%s", s.Rank.DP, num(s.KVUsedBlocks), num(s.KVTotalBlocks), ratio)
		if s.Running != nil || s.Waiting != nil {
			line += fmt.Sprintf(" run=%s wait=%s", num(s.Running), num(s.Waiting))
		}
		if s.BlockSize != nil {
			line += " block=" + num(s.BlockSize)
		}
		if s.PrefillTokens != nil {
			line += " P=" + num(s.PrefillTokens)
		}
		out = append(out, line)
	}
	return strings.Join(out, "; ")
}

func TestPages(t *testing.T) {
	for _, tt := range []struct {
		name    string
		worker  worker.Worker
		page    string
		want    string
		invalid bool
	}{
		{name: "01 usage and info", page: `vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.87
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1
`, want: "0: U=870 T=1000 ratio=0.87 block=16"},
		{name: "02 old name only", page: `vllm:gpu_cache_usage_perc{model_name="m"} 0.5
`, want: "0: U=- T=- ratio=0.5"},
		{name: "03 both names", page: `vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
`, want: "0: U=- T=- ratio=0.5"},
		{name: "03 the new name wins", page: `vllm:gpu_cache_usage_perc 0.7
vllm:kv_cache_usage_perc 0.5
`, want: "0: U=- T=- ratio=0.5"},
		{name: "04 the sum over engines is divided", page: `vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:cache_config_info{engine="0",num_gpu_blocks="2000"} 1
vllm:cache_config_info{engine="1",num_gpu_blocks="2000"} 1
`, want: "0: U=500 T=1000 ratio=0.5; 1: U=250 T=1000 ratio=0.25"},
		{name: "04 rounded down", page: `vllm:kv_cache_usage_perc{engine="0"} 0
vllm:kv_cache_usage_perc{engine="1"} 1
vllm:cache_config_info{engine="0",num_gpu_blocks="7"} 1
vllm:cache_config_info{engine="1",num_gpu_blocks="7"} 1
`, want: "0: U=0 T=3 ratio=0; 1: U=3 T=3 ratio=1"},
		{name: "05 blocks None", page: `vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="None"} 1
`, want: "0: U=- T=- ratio=0.5 block=16"},
		{name: "06 exponent", page: `vllm:kv_cache_usage_perc{engine="0"} 8.34e-05
`, want: "0: U=- T=- ratio=8.34e-05"},
		{name: "07 NaN", page: `vllm:kv_cache_usage_perc{engine="0"} NaN
`, want: "", invalid: true},
		{name: "07 infinite and negative", page: `vllm:kv_cache_usage_perc{engine="0"} +Inf
vllm:num_requests_running{engine="0"} -1
`, want: "", invalid: true},
		{name: "08 braces, quotes and spaces in a value", page: `vllm:kv_cache_usage_perc{model_name="a}b \" c,d=\"e\" \\",engine="1"} 0.5
`, want: "1: U=- T=- ratio=0.5"},
		{name: "09 several processes", page: `vllm:kv_cache_usage_perc{engine="0",pid="12"} 0.2
vllm:kv_cache_usage_perc{engine="0",pid="13"} 0.9
vllm:num_requests_running{engine="0",pid="12"} 7
vllm:num_requests_running{engine="0",pid="13"} 7
vllm:num_requests_waiting{engine="0",pid="12",priority=""} 3
vllm:num_requests_waiting{engine="0",pid="13",priority="1"} 2
`, want: "0: U=- T=- ratio=0.9 run=7 wait=3"},
		{name: "10 the label is handed on", page: `vllm:kv_cache_usage_perc{engine="3"} 0.9
`, want: "3: U=- T=- ratio=0.9"}, // and stored as rank 0: TestScrapeLoop
		{name: "11 declared ranks", worker: worker.Worker{DPStart: 4, DPSize: 2}, page: `vllm:kv_cache_usage_perc{engine="4"} 0.9
vllm:kv_cache_usage_perc{engine="5"} 0.1
`, want: "4: U=- T=- ratio=0.9; 5: U=- T=- ratio=0.1"},
		{name: "18 timestamp", page: `vllm:kv_cache_usage_perc{engine="0"} 0.25 1700000000000
`, want: "0: U=- T=- ratio=0.25"},
		{name: "19 cut inside a line", page: `vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_requests_running{engine="0"} 1`, want: "0: U=- T=- ratio=0.25", invalid: true},
		{name: "20 HTML", page: "<!DOCTYPE html>\n<html><body>vllm:kv_cache_usage_perc 0.5</body></html>\n", want: ""},
		{name: "21 two model names", page: `vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.3
vllm:kv_cache_usage_perc{engine="0",model_name="lora"} 0.4
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="0",model_name="lora"} 4
`, want: "0: U=- T=- ratio=0.4 run=7 wait=-"},
		{name: "priorities without a total", page: `vllm:num_requests_waiting{engine="0",priority="0"} 3
vllm:num_requests_waiting{engine="0",priority="1"} 4
`, want: "0: U=- T=- ratio=- run=- wait=7"},
		{name: "configured blocks win", worker: worker.Worker{KVTotalBlocks: 500}, page: `vllm:kv_cache_usage_perc 0.5
vllm:cache_config_info{num_gpu_blocks="1000"} 1
`, want: "0: U=250 T=500 ratio=0.5"},
		{name: "info of an unnamed engine, several ranks", page: `vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{block_size="32",num_gpu_blocks="1000"} 1
`, want: "0: U=- T=- ratio=0.5 block=32; 1: U=- T=- ratio=0.5 block=32"},
		{name: "capacity alone", page: `vllm:cache_config_info{engine="0",num_gpu_blocks="1000"} 1
`, want: "0: U=- T=1000 ratio=-"},
		{name: "OpenMetrics", page: `vllm:kv_cache_usage_perc{engine="0"} 0.5 1700000000.5 # {trace="x"} 1
# EOF`, want: "0: U=- T=- ratio=0.5", invalid: false},
		{name: "a rank that is none", page: `vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="4294967295"} 0.5
vllm:kv_cache_usage_perc{engine="x"} 0.5
`, want: "0: U=- T=- ratio=0.5", invalid: true},
		{name: "numbers too large", page: `vllm:kv_cache_usage_perc{engine="0"} 1e300
vllm:num_requests_running{engine="0"} 1e300
vllm:cache_config_info{engine="0",num_gpu_blocks="18446744073709551615"} 1
`, want: "0: U=- T=- ratio=1e+300", invalid: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := monitor.Reader{Worker: tt.worker}
			samples, _, invalid, _ := r.Read(tt.page, epoch)
			if got := show(samples); got != tt.want || invalid != tt.invalid {
				t.Errorf("page\n%sgives %q, invalid %v\nwant %q, invalid %v", tt.page, got, invalid, tt.want, tt.invalid)
			}
		})
	}
}

// However many names have requests, their sum stays a number.
func TestCountsHaveABound(t *testing.T) {
	var b strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&b, "vllm:num_requests_running{model_name=\"%d\"} 9e15\n", i)
	}
	var r monitor.Reader
	samples, _, _, _ := r.Read(b.String(), epoch)
	if got, want := show(samples), "0: U=- T=- ratio=- run=9007199254740992 wait=-"; got != want {
		t.Errorf("5000 names with 9e15 requests each give %q, want %q", got, want)
	}
}

func TestPageSequences(t *testing.T) {
	info := `vllm:cache_config_info{engine="0",num_gpu_blocks="1000"} 1` + "\n"
	usage := `vllm:kv_cache_usage_perc{engine="0"} 0.5` + "\n"
	two := usage + `vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{engine="0",num_gpu_blocks="2000"} 1
`
	for _, tt := range []struct {
		name    string
		pages   []string
		want    string // of the last page
		restart bool
	}{
		{"capacity is remembered", []string{usage + info, usage}, "0: U=500 T=1000 ratio=0.5", false},
		{"a cut page does not change capacity",
			[]string{two + `vllm:cache_config_info{engine="1",num_gpu_blocks="2000"} 1` + "\n", two + "vllm:cache_con"},
			"0: U=500 T=1000 ratio=0.5; 1: U=500 T=1000 ratio=0.5", false},
		{"22 start time jumps", []string{usage + info + "process_start_time_seconds 1000\n",
			usage + "process_start_time_seconds 2000\n"}, "0: U=- T=- ratio=0.5", true},
		{"22 start time wavers", []string{usage + info + "process_start_time_seconds 1000\n",
			usage + "process_start_time_seconds 1001\n"}, "0: U=500 T=1000 ratio=0.5", false},
		{"22 a counter falls", []string{usage + info + `vllm:prompt_tokens_total{engine="0"} 100` + "\n",
			usage + `vllm:prompt_tokens_total{engine="0"} 99` + "\n"}, "0: U=- T=- ratio=0.5", true},
		{"22 counters grow, others go", []string{usage + info +
			`vllm:prompt_tokens_total{engine="0"} 100` + "\n" + `vllm:generation_tokens_total{engine="0"} 100` + "\n",
			usage + `vllm:prompt_tokens_total{engine="0"} 101` + "\n"}, "0: U=500 T=1000 ratio=0.5", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var r monitor.Reader
			var got string
			var restarted bool
			for i, p := range tt.pages {
				var s []busy.Sample
				s, restarted, _, _ = r.Read(p, epoch.Add(time.Duration(i)*time.Second))
				got = show(s)
			}
			if got != tt.want || restarted != tt.restart {
				t.Errorf("last page gives %q, restarted %v\nwant %q, %v", got, restarted, tt.want, tt.restart)
			}
		})
	}
}

func TestPrefillEstimate(t *testing.T) {
	at := func(sum, count, waiting int) string {
		return fmt.Sprintf("vllm:num_requests_waiting %d\nvllm:request_prompt_tokens_sum %d\nvllm:request_prompt_tokens_count %d\n",
			waiting, sum, count)
	}
	type step struct {
		after time.Duration
		page  string
		want  uint64
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"mean of the difference", []step{{0, at(50_000, 50, 4), 0}, {time.Minute, at(90_000, 70, 4), 8000}}},
		{"too few requests", []step{{0, at(0, 0, 4), 0}, {time.Minute, at(38_000, 19, 4), 0}}},
		{"only the last five minutes", []step{{0, at(0, 0, 1), 0}, {4 * time.Minute, at(20_000, 20, 1), 1000},
			{6 * time.Minute, at(80_000, 40, 1), 3000}}},
		{"nobody waits", []step{{0, at(0, 0, 0), 0}, {time.Minute, at(20_000, 20, 0), 0}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := monitor.Reader{Estimate: true}
			for _, s := range tt.steps {
				samples, _, _, _ := r.Read(s.page, epoch.Add(s.after))
				if len(samples) != 1 || samples[0].PrefillTokens == nil || *samples[0].PrefillTokens != s.want {
					t.Errorf("after %v: %q, want P=%d", s.after, show(samples), s.want)
				}
			}
		})
	}
}

func TestSleep(t *testing.T) {
	for page, want := range map[string]bool{
		`vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0`:    true,
		`vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1`:    false,
		`vllm:engine_sleep_state{engine="0",sleep_state="discard"} 0`:  false,
		`vllm:kv_cache_usage_perc 0`:                                   false,
		`vllm:engine_sleep_state{sleep_state="awake",engine="1"} 0.00`: true,
	} {
		var r monitor.Reader
		if _, _, _, got := r.Read(page+"\n", epoch); got != want {
			t.Errorf("%s: asleep %v, want %v", page, got, want)
		}
	}
}
