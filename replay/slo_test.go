package replay_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway/replay"
)

func TestParseTTFT(t *testing.T) {
	for _, tt := range []struct {
		text  string
		isl   int
		limit time.Duration
		has   bool
		err   string
	}{
		{"", 1000, 0, false, ""},
		{"2s", 100000, 2 * time.Second, true, ""},
		{"2s+2x20000", 0, 2 * time.Second, true, ""},
		{"2s+2x20000", 10000, 3 * time.Second, true, ""},
		{"0s+1.5x1000", 1000, 1500 * time.Millisecond, true, ""},
		{"500ms+2x20000", 1, 500*time.Millisecond + 100*time.Microsecond, true, ""},
		{"0s", 0, 0, false, "never be met"},
		{"2", 0, 0, false, "duration"},
		{"-1s", 0, 0, false, "duration"},
		{"2s+", 0, 0, false, "FACTORxRATE"},
		{"2s+2", 0, 0, false, "FACTORxRATE"},
		{"2s+0x5", 0, 0, false, "factor"},
		{"2s+NaNx5", 0, 0, false, "factor"},
		{"2s+2x0", 0, 0, false, "rate"},
		{"2s+2x5x6", 0, 0, false, "rate"},
	} {
		l, err := replay.ParseTTFT(tt.text)
		if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("ParseTTFT(%q) error = %v, want %q", tt.text, err, tt.err)
		}
		if err != nil {
			continue
		}
		if got, has := l.Limit(tt.isl); got != tt.limit || has != tt.has {
			t.Errorf("ParseTTFT(%q).Limit(%d) = %v, %v; want %v, %v", tt.text, tt.isl, got, has, tt.limit, tt.has)
		}
		if again, err := replay.ParseTTFT(l.String()); again != l || err != nil {
			t.Errorf("ParseTTFT(%q) prints as %q, which reads as %+v, %v", tt.text, l, again, err)
		}
	}
}

func FuzzParseTTFT(f *testing.F) {
	f.Add("2s+2x20000")
	f.Add("1h1ns+0.001x1e9")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := replay.ParseTTFT(text)
		if err != nil {
			return
		}
		if again, err := replay.ParseTTFT(l.String()); again != l || err != nil {
			t.Errorf("ParseTTFT(%q) prints as %q, which reads as %+v, %v", text, l, again, err)
		}
		if d, _ := l.Limit(1 << 20); d < 0 && l.Constant < 1<<60 {
			t.Errorf("ParseTTFT(%q).Limit = %v", text, d)
		}
	})
}

// Percentiles are compared with those of the sorted values.
func TestHistogram(t *testing.T) {
	chance := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{0, 1, 2, 99, 100, 101, 10000} {
		var h replay.Histogram
		all := make([]time.Duration, n)
		for i := range all {
			all[i] = time.Duration(chance.ExpFloat64() * chance.ExpFloat64() * float64(time.Second))
			h.Add(all[i])
		}
		slices.Sort(all)
		for _, p := range []int{1, 50, 90, 99, 100} {
			var want time.Duration
			if n > 0 {
				want = all[(n*p+99)/100-1]
			}
			if got := h.Percentile(p); (got - want).Abs() > want/250 {
				t.Errorf("Percentile(%d) of %d = %v, want %v within 0.4%%", p, n, got, want)
			}
		}
		if n > 0 && h.Max() != all[n-1] || h.Count() != uint64(n) {
			t.Errorf("Max, Count = %v, %d of %d", h.Max(), h.Count(), n)
		}
	}
	var h replay.Histogram
	h.Add(-time.Second)
	h.Add(1<<63 - 1)
	if h.Percentile(50) != 0 || h.Percentile(100) < (1<<63-1)/256*255 {
		t.Errorf("extremes come back as %v and %v", h.Percentile(50), h.Percentile(100))
	}
}

func TestConfigValidate(t *testing.T) {
	valid := fixedConfig(1, time.Second)
	if err := valid.Validate(); err != nil {
		t.Fatalf("Validate of a fixed load: %v", err)
	}
	for key, set := range map[string]func(*replay.Config){
		"trace":         func(c *replay.Config) { c.Rate = 0 },
		"rate":          func(c *replay.Config) { c.TracePath = "x" },
		"poisson":       func(c *replay.Config) { c.TracePath, c.Rate, c.Poisson = "x", 0, true },
		"format":        func(c *replay.Config) { c.Format = "xml" },
		"isl":           func(c *replay.Config) { c.ISLTokens = 0 },
		"osl":           func(c *replay.Config) { c.OSLTokens = -1 },
		"requests":      func(c *replay.Config) { c.Requests = -1 },
		"duration":      func(c *replay.Config) { c.Rate, c.Duration = 1e6, time.Hour },
		"skip":          func(c *replay.Config) { c.Skip = -1 },
		"first":         func(c *replay.Config) { c.First = -1 },
		"spread":        func(c *replay.Config) { c.Spread = -1 },
		"speed":         func(c *replay.Config) { c.Speed = 0 },
		"speed-profile": func(c *replay.Config) { c.SpeedProfile = "1,10m" },
		"url":           func(c *replay.Config) { c.URL = "localhost:8000" },
		"model":         func(c *replay.Config) { c.Model = "" },
		"endpoint":      func(c *replay.Config) { c.Endpoint = "embeddings" },
		"timeout":       func(c *replay.Config) { c.Timeout = -1 },
		"leave":         func(c *replay.Config) { c.Leave = 1.1 },
		"leave-after":   func(c *replay.Config) { c.Leave, c.LeaveAfter = 0.1, 0 },
		"max-in-flight": func(c *replay.Config) { c.MaxInFlight = 0 },
		"slo-ttft":      func(c *replay.Config) { c.SLOTTFT = "x" },
		"slo-itl":       func(c *replay.Config) { c.SLOITL = -1 },
		"warmup":        func(c *replay.Config) { c.Warmup = -1 },
		"pids":          func(c *replay.Config) { c.PIDs = []string{"1", "-2"} },
		"stats-url":     func(c *replay.Config) { c.StatsURLs = []string{"sim"} },
	} {
		c := valid
		set(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), key+": ") {
			t.Errorf("Validate with a bad %s: %v, want an error that begins with it", key, err)
		}
	}
}

// steady returns the times of n tokens 10 ms apart, but for long gaps of 1 s at the end.
func steady(n, long int) []time.Duration {
	at := []time.Duration{10 * time.Millisecond}
	for i := 1; i < n; i++ {
		gap := 10 * time.Millisecond
		if i >= n-long {
			gap = time.Second
		}
		at = append(at, at[i-1]+gap)
	}
	return at
}

func TestObjectivesOfOneRequest(t *testing.T) {
	for _, tt := range []struct {
		name       string
		ttft       string
		isl        int
		lag        time.Duration
		at         []time.Duration
		ttftMS     float64
		late, slow int
	}{
		{"good", "20ms", 1, 0, steady(101, 0), 10, 0, 0},
		{"the client's lateness counts", "20ms", 1, 15 * time.Millisecond, steady(101, 0), 25, 1, 0},
		{"a long prompt may take longer", "20ms+2x1000", 3, 15 * time.Millisecond, steady(101, 0), 25, 0, 0},
		{"one long gap of 100 is beyond the p99", "20ms", 1, 0, steady(101, 1), 10, 0, 0},
		{"two are not", "20ms", 1, 0, steady(101, 2), 10, 0, 1},
		{"one of 99 is not", "20ms", 1, 0, steady(100, 1), 10, 0, 1},
		{"one token has no gap", "20ms", 1, 0, steady(1, 0), 10, 0, 0},
		{"both missed", "5ms", 1, 0, steady(10, 1), 10, 1, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := replay.DefaultConfig()
			cfg.SLOTTFT, cfg.SLOITL = tt.ttft, 50*time.Millisecond
			rep := replay.Complete(cfg, tt.isl, tt.lag, tt.at...)
			met := 1
			if tt.late+tt.slow > 0 {
				met = 0
			}
			if rep.SLO.MissedTTFT != tt.late || rep.SLO.MissedITL != tt.slow || rep.SLO.Met != met || rep.TTFT.P50MS != tt.ttftMS {
				t.Errorf("missed TTFT %d, ITL %d, met %d, TTFT %v ms; want %d, %d, %d, %v",
					rep.SLO.MissedTTFT, rep.SLO.MissedITL, rep.SLO.Met, rep.TTFT.P50MS, tt.late, tt.slow, met, tt.ttftMS)
			}
			if rep.SendLag.Count != 1 || rep.SendLag.MaxMS != float64(tt.lag)/1e6 || rep.OutputTokens != len(tt.at) {
				t.Errorf("send lag %+v, output tokens %d; want %v, %d", rep.SendLag, rep.OutputTokens, tt.lag, len(tt.at))
			}
		})
	}
}
