package busy_test

import (
	"math"
	"slices"
	"time"

	"spillway/busy"
	"spillway/worker"
)

// model is the slow, obvious List: it keeps every sample in a log, searches the log for each
// value it needs, and after every step judges all workers from scratch.
type model struct {
	cfg     busy.Config
	th      busy.Thresholds
	books   books // nil: events tell of promises
	workers map[worker.ID]*modelWorker
}

type modelWorker struct {
	w                   worker.Worker
	probed, healthy     bool
	draining, open      bool
	inhibited           time.Time
	slot                int
	ranks               map[uint32]*modelRank // by label
	mark                *modelMark
	busy, routable, all bool
	toBusy, toFree      uint64
}

type modelRank struct {
	log    map[busy.Source][]logged
	missed int
	mark   *modelMark
	held   map[string]bool // checks that it is over, by name
	over   bool            // without marks
	busy   bool
}

type logged struct {
	busy.Sample
	stored time.Time
}

type modelMark struct {
	at       time.Time
	hold     time.Duration // from at
	relieved bool
	sampled  bool
}

func newModel(cfg busy.Config, b books) *model {
	return &model{cfg, cfg.Thresholds(), b, map[worker.ID]*modelWorker{}}
}

func newModelRank() *modelRank {
	return &modelRank{log: map[busy.Source][]logged{}, held: map[string]bool{}}
}

func (m *model) register(w worker.Worker) {
	mw := m.workers[w.ID]
	if mw == nil {
		taken := map[int]bool{}
		for _, o := range m.workers {
			taken[o.slot] = true
		}
		mw = &modelWorker{ranks: map[uint32]*modelRank{}}
		for taken[mw.slot] {
			mw.slot++
		}
		m.workers[w.ID] = mw
	}
	mw.w = w
	mw.tidy()
}

func (w *modelWorker) declares(dp uint32) bool {
	return dp >= w.w.DPStart && dp-w.w.DPStart < w.w.DPSize
}

// tidy makes the set of ranks what it has to be: those declared, those with samples, and one
// if that is none.
func (w *modelWorker) tidy() {
	for dp := w.w.DPStart; dp < w.w.DPStart+w.w.DPSize; dp++ {
		if w.ranks[dp] == nil {
			w.ranks[dp] = newModelRank()
		}
	}
	if w.w.DPSize == 0 && len(w.ranks) == 1 {
		return
	}
	for dp, r := range w.ranks {
		if !w.declares(dp) && !r.observed() {
			delete(w.ranks, dp)
		}
	}
	if len(w.ranks) == 0 {
		w.ranks[0] = newModelRank()
	}
}

func (w *modelWorker) single() bool { return w.w.DPSize == 0 && len(w.ranks) == 1 }

func (w *modelWorker) labels() []uint32 {
	var dps []uint32
	for dp := range w.ranks {
		dps = append(dps, dp)
	}
	slices.Sort(dps)
	return dps
}

func (w *modelWorker) only() *modelRank { return w.ranks[w.labels()[0]] }

func (r *modelRank) observed() bool { return len(r.log[busy.Scrape])+len(r.log[busy.Event]) > 0 }

func (m *model) observe(w *modelWorker, s busy.Sample, now time.Time) {
	if w.single() && !w.only().observed() {
		w.ranks = map[uint32]*modelRank{s.Rank.DP: w.only()}
	}
	if w.ranks[s.Rank.DP] == nil {
		w.ranks[s.Rank.DP] = newModelRank()
	}
	r := w.ranks[s.Rank.DP]
	r.log[s.Source] = append(r.log[s.Source], logged{s, now})
	for _, mark := range []*modelMark{w.mark, r.mark} {
		if mark != nil && s.TakenAt.After(mark.at) {
			mark.sampled = true
		}
	}
}

func (m *model) scraped(w *modelWorker, page []busy.Sample, restarted bool, now time.Time) {
	if restarted {
		for _, r := range w.ranks {
			var kept []logged
			for _, s := range r.log[busy.Event] {
				if s.DecodeBlocks != nil || s.PrefillTokens != nil {
					s.Sample = busy.Sample{Rank: s.Rank, Source: s.Source, TakenAt: s.TakenAt,
						DecodeBlocks: s.DecodeBlocks, PrefillTokens: s.PrefillTokens}
					// Whether it was fresh is no longer held; its age is.
					s.stored = time.Time{}
					kept = append(kept, s)
				}
			}
			if kept != nil { // the age is that of the newest sample, whatever it told
				kept[len(kept)-1].TakenAt = r.log[busy.Event][len(r.log[busy.Event])-1].TakenAt
			}
			r.log = map[busy.Source][]logged{busy.Event: kept}
		}
	}
	shown := map[uint32]bool{}
	for _, s := range page {
		shown[s.Rank.DP] = true
	}
	if len(shown) == 1 && w.single() {
		w.ranks = map[uint32]*modelRank{page[0].Rank.DP: w.only()}
	}
	for _, s := range page {
		m.observe(w, s, now)
	}
	for dp, r := range w.ranks {
		if r.missed++; shown[dp] {
			r.missed = 0
		}
		if r.missed >= 3 {
			r.log[busy.Scrape] = nil
			if m.stale(r.log[busy.Event], now) {
				r.log[busy.Event] = nil
			}
		}
	}
	w.tidy()
}

func (m *model) stale(log []logged, now time.Time) bool {
	return len(log) == 0 || now.Sub(log[len(log)-1].TakenAt) > m.cfg.SignalStaleAfter
}

// last searches the log for a field.
func last[T any](log []logged, field func(logged) *T) *T {
	for i := len(log) - 1; i >= 0; i-- {
		if v := field(log[i]); v != nil {
			return v
		}
	}
	return nil
}

// firstOf returns the field from the first source that has it and satisfies accept.
func firstOf[T any](m *model, r *modelRank, now time.Time, isLoad bool, field func(logged) *T, accept func(T) bool) *T {
	for _, s := range []busy.Source{busy.Event, busy.Scrape} {
		if isLoad && m.cfg.StalePolicy == busy.StaleFree && m.stale(r.log[s], now) {
			continue
		}
		if v := last(r.log[s], field); v != nil && accept(*v) {
			return v
		}
	}
	return nil
}

func positive(v uint64) bool { return v > 0 }
func whatever[T any](T) bool { return true }

// ratios are the values that thresholds are compared with, by check.
func (m *model) ratios(id worker.ID, w *modelWorker, dp uint32, now time.Time) map[string]float64 {
	r, v := w.ranks[dp], map[string]float64{}
	n, rank := 1.0, worker.Rank{Worker: id, DP: dp}
	if w.single() {
		rank.DP = 0
	}
	if w.w.RankRouting == worker.RankByEngine {
		n, rank.DP = float64(len(w.ranks)), worker.AnyDP
	}
	promised, prefill := float64(m.books[rank][0])/n, float64(m.books[rank][1])/n
	if m.books == nil {
		if a := firstOf(m, r, now, true, func(s logged) *uint64 { return s.DecodeBlocks }, whatever); a != nil {
			promised = float64(*a)
		}
	}
	for _, s := range []busy.Source{busy.Event, busy.Scrape} {
		if m.cfg.StalePolicy == busy.StaleFree && m.stale(r.log[s], now) {
			continue
		}
		if p := last(r.log[s], func(s logged) *uint64 { return s.PrefillTokens }); p != nil {
			prefill = math.Max(prefill, float64(*p))
		}
	}
	total := firstOf(m, r, now, false, func(s logged) *uint64 { return s.KVTotalBlocks }, positive)
	if w.w.KVTotalBlocks > 0 {
		total = &w.w.KVTotalBlocks
	}
	budget := firstOf(m, r, now, false, func(s logged) *uint64 { return s.MaxNumBatchedTokens }, positive)
	if w.w.MaxNumBatchedTokens > 0 {
		budget = &w.w.MaxNumBatchedTokens
	}
	used := firstOf(m, r, now, true, func(s logged) *uint64 { return s.KVUsedBlocks }, whatever)
	ratio := firstOf(m, r, now, true, func(s logged) *float64 { return s.KVUsageRatio }, whatever)
	if total != nil {
		v["promised"] = promised / float64(*total)
	}
	switch {
	case used != nil && total != nil:
		v["reported"] = float64(*used) / float64(*total)
	case ratio != nil:
		v["reported"] = *ratio
	}
	v["prefill"] = prefill
	if budget != nil {
		v["fraction"] = prefill / float64(*budget)
	}
	return v
}

func (m *model) over(id worker.ID, w *modelWorker, dp uint32, now time.Time) bool {
	r := w.ranks[dp]
	limits := map[string]*float64{"promised": m.th.DecodeFrac, "reported": m.th.DecodeFrac, "fraction": m.th.PrefillFrac}
	if m.th.PrefillTokens != nil {
		limits["prefill"] = new(float64(*m.th.PrefillTokens))
	}
	held := map[string]bool{}
	for check, value := range m.ratios(id, w, dp, now) {
		limit := limits[check]
		if limit == nil {
			continue
		}
		if value > *limit || r.held[check] && value > m.cfg.BusyReleaseRatio**limit {
			held[check] = true
		}
	}
	r.held = held
	return len(held) > 0 || m.th.Any() && m.silent(r, now)
}

// silent reports whether the policy makes the rank busy for the age of what it has sent.
func (m *model) silent(r *modelRank, now time.Time) bool {
	if m.cfg.StalePolicy != busy.StaleBusy || !r.observed() {
		return false
	}
	wasFresh := false
	for _, log := range r.log {
		for _, s := range log {
			wasFresh = wasFresh || !s.stored.IsZero() && s.stored.Sub(s.TakenAt) <= m.cfg.SignalStaleAfter
		}
	}
	return wasFresh && m.stale(r.log[busy.Event], now) && m.stale(r.log[busy.Scrape], now)
}

// settled returns the mark as it is after a verdict, nil if it has ended.
func (mark *modelMark) settled(free bool, now time.Time) *modelMark {
	if mark == nil {
		return nil
	}
	mark.relieved = mark.relieved || mark.sampled && free
	mark.sampled = false
	age := now.Sub(mark.at)
	if age >= 10*time.Second || mark.relieved && age >= mark.hold {
		return nil
	}
	return mark
}

// remarked returns a new mark that lasts as long as the old one has to.
func (m *model) remarked(old *modelMark, retryAfter time.Duration, now time.Time) *modelMark {
	hold := min(max(m.cfg.BackpressureHold, retryAfter), 10*time.Second)
	if old != nil {
		hold = max(hold, old.at.Add(old.hold).Sub(now))
	}
	return &modelMark{at: now, hold: hold}
}

// judge makes all verdicts.
func (m *model) judge(now time.Time) {
	for id, w := range m.workers {
		everyOver := true
		for dp, r := range w.ranks {
			r.over = m.over(id, w, dp, now)
			everyOver = everyOver && r.over
		}
		w.mark = w.mark.settled(!everyOver, now)
		was := w.busy
		w.busy, w.all = true, true
		for _, r := range w.ranks {
			r.mark = r.mark.settled(!r.over, now)
			marked := w.mark != nil || r.mark != nil
			r.busy = r.over || marked && m.th.Any()
			w.busy, w.all = w.busy && r.busy, w.all && marked
		}
		w.routable = (!w.probed || w.healthy) && !now.Before(w.inhibited) && !w.draining && !w.open
		if w.busy && !was {
			w.toBusy++
		} else if was && !w.busy {
			w.toFree++
		}
	}
}

// snapshot is the picture that the List has to show.
func (m *model) snapshot() *busy.Snapshot {
	s := &busy.Snapshot{ThresholdsSet: m.th.Any()}
	var ids []worker.ID
	unmarked := false
	for id, w := range m.workers {
		ids = append(ids, id)
		unmarked = unmarked || w.routable && !w.all
	}
	slices.Sort(ids)
	for _, id := range ids {
		w := m.workers[id]
		s.Registered, s.RegisteredSlots = append(s.Registered, id), append(s.RegisteredSlots, int32(w.slot))
		if w.busy {
			s.Busy = append(s.Busy, id)
		}
		if w.all {
			s.Marked = append(s.Marked, id)
		}
		if !w.routable {
			continue
		}
		s.Routable, s.RoutableSlots = append(s.Routable, id), append(s.RoutableSlots, int32(w.slot))
		if m.th.Any() && !w.busy || !m.th.Any() && (!w.all || !unmarked) {
			s.Free, s.FreeSlots = append(s.Free, id), append(s.FreeSlots, int32(w.slot))
		}
	}
	return s
}
