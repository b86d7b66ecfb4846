package busy_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/busy"
	"spillway/worker"
)

// pair is a List and the model that it has to agree with.
type pair struct {
	list  *busy.List
	model *model
	now   time.Time
}

func drawConfig(t *rapid.T) busy.Config {
	cfg := busy.DefaultConfig()
	cfg.StalePolicy = rapid.SampledFrom([]string{busy.StaleHold, busy.StaleFree, busy.StaleBusy}).Draw(t, "policy")
	cfg.BusyReleaseRatio = rapid.SampledFrom([]float64{1, 0.5, 0.8}).Draw(t, "release")
	th := drawThresholds(t)
	cfg.ActiveDecodeBlocksThreshold, cfg.ActivePrefillTokensThreshold = th.DecodeFrac, th.PrefillTokens
	cfg.ActivePrefillTokensThresholdFrac = th.PrefillFrac
	return cfg
}

func drawThresholds(t *rapid.T) busy.Thresholds {
	var th busy.Thresholds
	if rapid.IntRange(0, 3).Draw(t, "dthr set") > 0 {
		th.DecodeFrac = new(rapid.SampledFrom([]float64{0, 0.3, 0.5, 0.9}).Draw(t, "dthr"))
	}
	if rapid.Bool().Draw(t, "pthr set") {
		th.PrefillTokens = new(rapid.Uint64Range(0, 12).Draw(t, "pthr"))
	}
	if rapid.Bool().Draw(t, "pfrac set") {
		th.PrefillFrac = new(rapid.SampledFrom([]float64{0, 0.5, 2}).Draw(t, "pfrac"))
	}
	return th
}

// drawSample has at least one value; a sample without any is another test's.
func (p *pair) drawSample(t *rapid.T, id worker.ID, source busy.Source) busy.Sample {
	s := busy.Sample{
		Rank:    worker.Rank{Worker: id, DP: rapid.Uint32Range(0, 3).Draw(t, "label")},
		Source:  source,
		TakenAt: p.now.Add(-time.Duration(rapid.SampledFrom([]int{0, 0, 500, 2000, 7000}).Draw(t, "age ms")) * time.Millisecond),
	}
	for _, f := range []**uint64{&s.DecodeBlocks, &s.KVUsedBlocks, &s.KVTotalBlocks, &s.PrefillTokens, &s.MaxNumBatchedTokens} {
		if rapid.IntRange(0, 2).Draw(t, "present") > 0 {
			*f = new(rapid.Uint64Range(0, 12).Draw(t, "value"))
		}
	}
	if rapid.Bool().Draw(t, "ratio present") {
		s.KVUsageRatio = new(rapid.SampledFrom([]float64{0, 0.3, 0.6, 1.1}).Draw(t, "ratio"))
	}
	if s.DecodeBlocks == nil && s.KVUsedBlocks == nil && s.KVTotalBlocks == nil && s.KVUsageRatio == nil &&
		s.PrefillTokens == nil && s.MaxNumBatchedTokens == nil {
		s.KVUsedBlocks = new(uint64(9))
	}
	return s
}

// step does one random thing to both.
func (p *pair) step(t *rapid.T) {
	p.now = p.now.Add(time.Duration(rapid.SampledFrom([]int{0, 0, 1, 300, 1000, 4000, 11000}).Draw(t, "ms later")) * time.Millisecond)
	id := worker.ID(rapid.IntRange(1, 3).Draw(t, "worker"))
	mw := p.model.workers[id]
	if mw == nil {
		mw = &modelWorker{ranks: map[uint32]*modelRank{0: newModelRank()}} // changes to it are lost
	}
	switch op := rapid.SampledFrom(operations).Draw(t, "operation"); op {
	case "register":
		w := worker.Worker{ID: id, DPStart: rapid.Uint32Range(0, 2).Draw(t, "start"), DPSize: rapid.Uint32Range(0, 2).Draw(t, "size")}
		w.KVTotalBlocks = rapid.SampledFrom([]uint64{0, 0, 10}).Draw(t, "T")
		w.MaxNumBatchedTokens = rapid.SampledFrom([]uint64{0, 0, 8}).Draw(t, "M")
		w.RankRouting = rapid.SampledFrom([]worker.RankRouting{worker.RankBySpillway, worker.RankByEngine}).Draw(t, "routing")
		p.model.register(w)
		p.list.Register(&w, p.now)
	case "unregister":
		delete(p.model.workers, id)
		p.list.Unregister(id, p.now)
	case "event":
		s := p.drawSample(t, id, busy.Event)
		p.model.observe(mw, s, p.now)
		p.list.Observe(s, p.now)
	case "page":
		var page []busy.Sample
		for range rapid.IntRange(0, 3).Draw(t, "samples") {
			page = append(page, p.drawSample(t, id, busy.Scrape))
		}
		restarted := rapid.IntRange(0, 4).Draw(t, "restarted") == 0
		p.model.scraped(mw, page, restarted, p.now)
		p.list.Scraped(id, page, restarted, p.now)
	case "promise":
		if p.model.books != nil {
			dp := rapid.SampledFrom([]uint32{0, 0, 1, 2, 3, worker.AnyDP}).Draw(t, "dp")
			p.model.books[worker.Rank{Worker: id, DP: dp}] = [2]uint64{
				rapid.Uint64Range(0, 12).Draw(t, "A"), rapid.Uint64Range(0, 15).Draw(t, "P")}
		}
		p.list.Refresh(id, p.now)
	case "probe":
		mw.probed, mw.healthy = true, rapid.Bool().Draw(t, "healthy")
		if mw.healthy {
			mw.inhibited = time.Time{}
		}
		p.list.SetHealthy(id, mw.healthy, p.now)
	case "inhibit":
		until := p.now.Add(time.Duration(rapid.IntRange(0, 8).Draw(t, "s")) * time.Second)
		if until.After(mw.inhibited) {
			mw.inhibited = until
		}
		p.list.Inhibit(id, until, p.now)
	case "exclude":
		mw.draining, mw.open = rapid.Bool().Draw(t, "draining"), rapid.Bool().Draw(t, "open")
		p.list.SetDraining(id, mw.draining, p.now)
		p.list.SetCircuit(id, mw.open, p.now)
	case "mark":
		retryAfter := time.Duration(rapid.SampledFrom([]int{0, 0, 3, 60}).Draw(t, "retry after")) * time.Second
		var dp *uint32
		if rapid.Bool().Draw(t, "pinned") {
			dp = new(rapid.Uint32Range(0, 3).Draw(t, "dp"))
		}
		if r := mw.ranks[deref(dp)]; dp == nil || mw.single() || mw.w.RankRouting == worker.RankByEngine {
			mw.mark = p.model.remarked(mw.mark, retryAfter, p.now)
		} else if r != nil {
			r.mark = p.model.remarked(r.mark, retryAfter, p.now)
		}
		p.list.Mark(id, dp, retryAfter, p.now)
	case "thresholds":
		p.model.th = drawThresholds(t)
		for _, w := range p.model.workers {
			for _, r := range w.ranks {
				r.held = nil
			}
		}
		p.list.SetThresholds(p.model.th, p.now)
	}
	p.model.judge(p.now)
	p.list.Tick(p.now)
}

var operations = []string{"register", "register", "unregister", "event", "event", "page", "page", "page", "promise", "promise",
	"promise", "probe", "inhibit", "exclude", "mark", "mark", "thresholds", "wait"}

func deref(p *uint32) uint32 {
	if p == nil {
		return 0
	}
	return *p
}

// compare checks everything that can be seen against the model.
func (p *pair) compare(t *rapid.T) {
	got, want := p.list.Snapshot(), p.model.snapshot()
	want.SlotCount = got.SlotCount
	if fmt.Sprint(*got) != fmt.Sprint(*want) {
		t.Fatalf("snapshot\n got %+v\nwant %+v", *got, *want)
	}
	for _, st := range p.list.Workers(p.now) {
		mw := p.model.workers[st.ID]
		if st.ToBusy != mw.toBusy || st.ToFree != mw.toFree {
			t.Fatalf("worker %d: transitions %d %d, want %d %d", st.ID, st.ToBusy, st.ToFree, mw.toBusy, mw.toFree)
		}
		labels := mw.labels()
		if len(st.Ranks) != len(labels) {
			t.Fatalf("worker %d: %d ranks, want %v", st.ID, len(st.Ranks), labels)
		}
		var free []uint32
		for i, dp := range labels {
			r, want := st.Ranks[i], mw.ranks[dp]
			if mw.single() {
				dp = 0
			}
			if r.DP != dp || r.Checks.Busy() != want.busy || r.Sampled != want.observed() {
				t.Fatalf("worker %d rank %d: %+v, want busy %v, observed %v", st.ID, dp, r, want.busy, want.observed())
			}
			if !want.busy && mw.routable && (p.model.th.Any() || mw.all || mw.mark == nil && want.mark == nil) {
				free = append(free, dp)
			}
		}
		if mw.w.RankRouting == worker.RankByEngine && len(free) > 0 {
			free = []uint32{worker.AnyDP}
		}
		var rooms []uint32
		for _, room := range p.list.FreeRanks(st.ID, nil) {
			rooms = append(rooms, room.DP)
			if b := p.model.books[worker.Rank{Worker: st.ID, DP: room.DP}]; p.model.books != nil &&
				p.model.cfg.BusyReleaseRatio == 1 && (b[0] > room.MaxDecodeBlocks || b[1] > room.MaxPrefillTokens) {
				t.Fatalf("worker %d: %v has no room for what it holds: %+v", st.ID, b, room)
			}
		}
		if !slices.Equal(rooms, free) {
			t.Fatalf("worker %d: FreeRanks %v, want %v", st.ID, rooms, free)
		}
	}
}

func TestAgreesWithModel(t *testing.T) {
	for range 10 { // rapid's own number of runs is too small to meet rare sequences
		rapid.Check(t, agreesWithModel)
	}
}

func agreesWithModel(t *rapid.T) {
	cfg := drawConfig(t)
	p := &pair{now: t0}
	if rapid.Bool().Draw(t, "books") {
		b := books{}
		p.list, p.model = busy.New(cfg, b), newModel(cfg, b)
	} else {
		p.list, p.model = busy.New(cfg, nil), newModel(cfg, nil)
	}
	for range rapid.IntRange(1, 60).Draw(t, "steps") {
		p.step(t)
		p.compare(t)
	}
}
