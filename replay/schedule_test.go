package replay_test

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/replay"
)

func traceConfig() replay.Config {
	cfg := replay.DefaultConfig()
	cfg.TracePath = "testdata/mooncake-250.jsonl"
	return cfg
}

func fixedConfig(rate float64, d time.Duration) replay.Config {
	cfg := replay.DefaultConfig()
	cfg.Rate, cfg.Duration = rate, d
	return cfg
}

func schedule(t *testing.T, cfg replay.Config) []replay.Request {
	t.Helper()
	reqs, err := replay.Schedule(cfg)
	if err != nil {
		t.Fatalf("Schedule: %v", err)
	}
	return reqs
}

func TestScheduleIsRepeatable(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  replay.Config
		set  func(*replay.Config)
		same bool
	}{
		{"trace again", traceConfig(), func(*replay.Config) {}, true},
		{"trace, other seed, no chance", traceConfig(), func(c *replay.Config) { c.Seed = 2 }, true},
		{"spread, other seed", func() replay.Config { c := traceConfig(); c.Spread = 3 * time.Second; return c }(), func(c *replay.Config) { c.Seed = 2 }, false},
		{"spread again", func() replay.Config { c := traceConfig(); c.Spread = 3 * time.Second; return c }(), func(*replay.Config) {}, true},
		{"spread or not", traceConfig(), func(c *replay.Config) { c.Spread = 3 * time.Second }, false},
		{"other speed", traceConfig(), func(c *replay.Config) { c.Speed = 2 }, false},
		{"one fewer", traceConfig(), func(c *replay.Config) { c.Requests = 249 }, false},
		{"fixed again", fixedConfig(10, time.Second), func(*replay.Config) {}, true},
		{"fixed, other seed", fixedConfig(10, time.Second), func(c *replay.Config) { c.Seed = 2 }, false},
		{"fixed, other output", fixedConfig(10, time.Second), func(c *replay.Config) { c.OSLTokens++ }, false},
		{"other patience", fixedConfig(10, time.Second), func(c *replay.Config) { c.Timeout++; c.Leave = 0.5 }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := replay.ArrivalHash(schedule(t, tt.cfg))
			tt.set(&tt.cfg)
			b := replay.ArrivalHash(schedule(t, tt.cfg))
			if (a == b) != tt.same || len(a) != 32 {
				t.Errorf("hashes %s and %s, want same %v", a, b, tt.same)
			}
		})
	}
}

func TestScheduleCut(t *testing.T) {
	for _, tt := range []struct {
		name        string
		skip, first time.Duration
		n           int
		at          time.Duration
	}{
		{"all", 0, 0, 250, 0},
		{"only the first lump", 0, time.Millisecond, 10, 0},
		{"none of the first lump", 3 * time.Second, 0, 240, 0},
		{"the end is excluded", 0, 3 * time.Second, 10, 0},
		{"skip, then first", 2 * time.Second, 2 * time.Second, 16, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := traceConfig()
			cfg.Skip, cfg.First = tt.skip, tt.first
			reqs := schedule(t, cfg)
			if len(reqs) != tt.n || reqs[0].At != tt.at {
				t.Errorf("skip %v, first %v: %d requests from %v, want %d from %v", tt.skip, tt.first, len(reqs), reqs[0].At, tt.n, tt.at)
			}
		})
	}
	cfg := traceConfig()
	cfg.Skip = time.Hour
	if _, err := replay.Schedule(cfg); err == nil || !strings.Contains(err.Error(), "--skip") {
		t.Errorf("Schedule with all skipped: error %v, want one that names --skip", err)
	}
}

func TestScheduleSpread(t *testing.T) {
	plain := schedule(t, traceConfig())
	cfg := traceConfig()
	cfg.Spread = 3 * time.Second
	moved := schedule(t, cfg)
	key := func(r replay.Request) uint64 { return r.Blocks[len(r.Blocks)-1]<<20 | uint64(r.ISLTokens) }
	was := map[uint64]time.Duration{}
	for _, r := range plain {
		was[key(r)] = r.At
	}
	times := map[time.Duration]bool{}
	for i, r := range moved {
		if by := r.At - was[key(r)]; by < 0 || by >= cfg.Spread {
			t.Errorf("request %d moved by %v, want [0, %v)", i, by, cfg.Spread)
		}
		if i > 0 && r.At < moved[i-1].At {
			t.Errorf("request %d at %v comes before %v", i, r.At, moved[i-1].At)
		}
		times[r.At] = true
	}
	if len(moved) != len(plain) || len(times) < 245 {
		t.Errorf("%d requests at %d times, want %d at about as many", len(moved), len(times), len(plain))
	}
}

func TestScheduleFixedLoad(t *testing.T) {
	even := schedule(t, fixedConfig(20, 10*time.Second))
	if len(even) != 200 || even[0].At != 0 || even[199].At != 9950*time.Millisecond {
		t.Errorf("20/s for 10 s: %d from %v to %v, want 200 from 0 to 9.95s", len(even), even[0].At, even[len(even)-1].At)
	}
	cfg := fixedConfig(20, time.Second)
	cfg.Requests, cfg.Speed = 100, 2
	if reqs := schedule(t, cfg); len(reqs) != 100 || reqs[99].At != 2475*time.Millisecond {
		t.Errorf("100 requests at 20/s, speed 2: %d to %v, want 100 to 2.475s", len(reqs), reqs[len(reqs)-1].At)
	}
	cfg = fixedConfig(100, 100*time.Second)
	cfg.Poisson = true
	poisson := schedule(t, cfg)
	if n := len(poisson); n < 9500 || n > 10500 { // five standard deviations
		t.Errorf("Poisson of 100/s for 100 s has %d arrivals", n)
	}
	long := 0
	for i := 1; i < len(poisson); i++ {
		if poisson[i].At-poisson[i-1].At > 10*time.Millisecond {
			long++
		}
	}
	if share := float64(long) / float64(len(poisson)); math.Abs(share-1/math.E) > 0.03 {
		t.Errorf("share of gaps above the mean is %v, want 1/e", share)
	}
}

func TestScheduleSpeedProfile(t *testing.T) {
	cfg := fixedConfig(10, 100*time.Second)
	cfg.Speed, cfg.SpeedProfile = 2, "0.8,20s"
	for i, r := range schedule(t, cfg) {
		if i%100 != 0 {
			continue
		}
		got, err := replay.TraceTime(cfg.SpeedProfile, cfg.Speed, r.At)
		want := time.Duration(i) * 100 * time.Millisecond
		if err != nil || (got-want).Abs() > 2*time.Millisecond {
			t.Errorf("at real time %v trace time is %v (%v), want %v", r.At, got, err, want)
		}
	}
}

func TestScheduleLeavers(t *testing.T) {
	cfg := fixedConfig(1000, 10*time.Second)
	cfg.Leave, cfg.LeaveAfter = 0.3, time.Second
	n := 0
	for _, r := range schedule(t, cfg) {
		if r.LeaveAfter > 0 {
			n++
		}
		if r.LeaveAfter < 0 || r.LeaveAfter > time.Second {
			t.Errorf("leaves after %v, want at most 1s", r.LeaveAfter)
		}
	}
	if n < 2750 || n > 3250 { // five standard deviations
		t.Errorf("%d of 10000 leave, want about 3000", n)
	}
}

func TestAppendPrompt(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		isl := rapid.IntRange(1, 3000).Draw(rt, "isl")
		ids := rapid.SliceOfN(rapid.Uint64Range(0, 3), (isl+511)/512, (isl+511)/512).Draw(rt, "ids")
		r := replay.Request{ISLTokens: isl, OSLTokens: 1, Blocks: ids}
		text := replay.AppendPrompt([]byte("before"), &r)[len("before"):]
		if len(text) != 4*isl {
			rt.Fatalf("%d bytes for %d tokens", len(text), isl)
		}
		if bytes.ContainsFunc(text, func(c rune) bool { return c != ' ' && (c < 'a' || c > 'z') }) {
			rt.Fatalf("text that is more than letters and spaces: %q", text)
		}
		blocks := slices.Collect(slices.Chunk(text, 2048))
		for i := range blocks {
			for j := range i {
				n := min(len(blocks[i]), len(blocks[j]), 16)
				if same := bytes.Equal(blocks[i][:n], blocks[j][:n]); n == 16 && same != (ids[i] == ids[j]) {
					rt.Fatalf("blocks %d and %d of ids %d and %d: same text is %v", i, j, ids[i], ids[j], same)
				}
			}
		}
	})
}

func TestPromptsOfAFixedLoadDiffer(t *testing.T) {
	cfg := fixedConfig(100, 10*time.Second)
	seen := map[string]bool{}
	for _, seed := range []uint64{1, 2} {
		cfg.Seed = seed
		for _, r := range schedule(t, cfg) {
			text := replay.AppendPrompt(nil, &r)
			if again := replay.AppendPrompt(nil, &r); !bytes.Equal(text, again) {
				t.Fatal("the same request has two texts")
			}
			for block := range slices.Chunk(text, 1024) {
				seen[string(block[:32])] = true
			}
		}
	}
	if len(seen) != 2*1000*4 {
		t.Errorf("%d different half blocks, want 8000", len(seen))
	}
}
