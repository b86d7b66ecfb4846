package monitor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"spillway/busy"
	"spillway/worker"
)

const (
	idleInterval = 15 * time.Second // between scrapes that nothing depends on
	backOffAfter = 3                // failures in a row
	maxBackOff   = 5 * time.Second
	idleStreak   = 3 // pages in a row that say nothing is running
)

// scraper is the loop that looks at one worker's load.
type scraper struct {
	m        *KvWorkerMonitor
	w        *watch
	where    whereabouts
	history  history
	hinted   bool      // that its metrics page is missing has been logged
	askAgain time.Time // when the server may be asked again for what its pages leave out
	failures int       // in a row
	problem  bool
	idle     map[uint32]int // pages in a row on which the rank had nothing to do
}

// run scrapes until ctx ends.
func (s *scraper) run(ctx context.Context) {
	interval := s.m.cfg.ScrapeInterval
	if interval == 0 || !pause(ctx, spread(s.w.id, interval)) {
		return
	}
	var last time.Time
	for {
		now := time.Now()
		wait := interval
		if record, list := s.w.target(); list != nil &&
			(last.IsZero() || s.m.needed() || now.Sub(last) >= idleInterval) {
			last = now
			s.scrape(ctx, record, now)
			if s.failures >= backOffAfter {
				wait = max(interval, min(4*interval, maxBackOff))
			}
			wait -= time.Since(now)
		}
		if !pause(ctx, wait) {
			return
		}
	}
}

// spread is the part of an interval after which a worker's turn comes, so that the workers of
// a fleet are not all asked at the same moment. Consecutive IDs end up far apart.
func spread(id worker.ID, interval time.Duration) time.Duration {
	const golden = 0x9E3779B97F4A7C15 // 2^64 over the golden ratio
	part := float64(uint64(id)*golden>>11) / (1 << 53)
	return time.Duration(part * float64(interval))
}

// scrape takes one page.
func (s *scraper) scrape(ctx context.Context, record *worker.Worker, sent time.Time) {
	limit, cancel := context.WithTimeout(ctx, min(s.m.cfg.ScrapeTimeout, s.m.cfg.ScrapeInterval))
	defer cancel()
	s.where.prepare(record, s.m.cfg.Engine)
	var err error
	for range len(s.where.places) {
		at := s.where.place()
		nothing := s.m.get.get(limit, at.url, record.APIKey, at.accept, func(body []byte, whole bool) error {
			return s.take(body, whole, record, sent)
		})
		if err == nil || !errors.Is(nothing, errNotHere) {
			err = nothing
		}
		if !errors.Is(nothing, errNotHere) {
			break
		}
		if s.where.notHere(nothing) {
			err = s.explain(err)
			break
		}
	}
	if ctx.Err() != nil {
		return // forgotten meanwhile: what failed then is not the worker's fault
	}
	s.w.metrics.duration.Observe(time.Since(sent).Seconds())
	s.account(record, err)
	if err == nil && s.where.speaks == sglangLoads && !s.hinted {
		s.hinted = true
		s.m.log.Info("worker has no metrics page, /v1/loads is read instead: "+sglangHint, "worker", record.Name)
	}
	if s.where.asksServer() && !sent.Before(s.askAgain) {
		s.askServer(ctx, record, sent)
	}
}

// explain adds to the finding that there is nothing to be read what most often helps.
func (s *scraper) explain(err error) error {
	for _, p := range s.where.places {
		if slices.Contains(p.dialects, sglangLoads) {
			return fmt.Errorf("%w; neither is there anything else to go by (%s)", err, sglangHint)
		}
	}
	return err
}

const (
	askedInterval   = 5 * time.Minute  // after an answer
	unaskedInterval = 10 * time.Second // after none
)

// askServer asks for what is not on the pages. Without an answer the checks that need it are
// left out, so nothing is logged or counted.
func (s *scraper) askServer(ctx context.Context, record *worker.Worker, now time.Time) {
	limit, cancel := context.WithTimeout(ctx, s.m.cfg.ScrapeTimeout)
	defer cancel()
	s.askAgain = now.Add(unaskedInterval)
	err := s.m.get.get(limit, record.Endpoint+"/get_server_info", record.APIKey, acceptJSON, func(body []byte, whole bool) error {
		info, err := readServerInfo(body)
		if err == nil {
			s.history.server = info
		}
		return err
	})
	if errors.Is(err, errNotHere) {
		s.history.server.told = true
	}
	if err == nil || errors.Is(err, errNotHere) {
		s.askAgain = now.Add(askedInterval)
	}
}

// take hands a page to the busy list. An error that is partial means that the page was of use
// nevertheless.
func (s *scraper) take(body []byte, whole bool, record *worker.Worker, sent time.Time) error {
	url := s.where.place().url
	p, usageName := s.where.read(body)
	if !whole {
		p.truncated, p.invalid = true, true
	}
	if p.truncated && len(p.ranks) < len(s.history.ranks) {
		// Which ranks are left out would decide what the others' labels mean.
		return &failure{reasonParse, fmt.Errorf("%s ended early", url)}
	}
	restarted := s.history.restarted(p)
	if restarted {
		s.m.log.Info("worker was restarted: its earlier numbers are dropped", "worker", record.Name)
		clear(s.idle)
		s.askAgain = time.Time{}
		if s.m.Restarted != nil {
			s.m.Restarted(record.ID)
		}
	}
	samples := s.history.samples(p, record, sent, s.m.cfg.EnginePrefillEstimate)
	usage := false
	for i := range samples {
		usage = usage || samples[i].KVUsageRatio != nil || samples[i].KVUsedBlocks != nil
	}
	if len(samples) > 0 || restarted {
		s.w.scraped(samples, restarted, p.asleep, time.Now())
		s.compare(samples, record, time.Now())
	}
	switch {
	case p.invalid:
		return &failure{reasonParse, partial(len(samples) > 0, "%s has unusable values", url)}
	case !usage:
		return &failure{reasonMissing, partial(len(samples) > 0,
			"%s has no %s", url, usageName)}
	}
	return nil
}

// errPartial marks a page that was of use although something was wrong with it.
var errPartial = errors.New("the rest of the page is used")

func partial(useful bool, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if useful {
		return fmt.Errorf("%w (%w)", err, errPartial)
	}
	return err
}

// account counts what became of a scrape, and logs when that changes.
func (s *scraper) account(record *worker.Worker, err error) {
	var f *failure
	if errors.As(err, &f) {
		s.w.metrics.errors[f.reason].Inc()
	}
	if err == nil || errors.Is(err, errPartial) {
		s.failures = 0
		s.w.scrapeSucceeded()
	} else {
		s.failures++
		s.w.scrapeFailed(f)
	}
	switch {
	case err != nil && !s.problem:
		s.m.log.Warn("worker's metrics cannot be read", "worker", record.Name, "reason", f.reason, "err", err)
	case err == nil && s.problem:
		s.m.log.Info("worker's metrics can be read again", "worker", record.Name)
	}
	s.problem = err != nil
}

// compare looks for ranks that have had nothing to do for some pages while the tracker still
// holds old load for them: either a leak of ours or a restart that went unnoticed. It only
// tells; a request may be in the worker's HTTP server and not yet in its engine.
func (s *scraper) compare(samples []busy.Sample, record *worker.Worker, now time.Time) {
	if s.m.Held == nil {
		return
	}
	if s.idle == nil {
		s.idle = map[uint32]int{}
	}
	active := map[uint32]bool{} // of the ranks of this page that tell
	for i := range samples {
		if r := &samples[i]; r.Running != nil && r.Waiting != nil {
			dp := bookedUnder(r.Rank.DP, len(samples), record)
			active[dp] = active[dp] || *r.Running+*r.Waiting > 0
		}
	}
	for dp := range s.idle {
		if was, ok := active[dp]; !ok || was {
			delete(s.idle, dp)
		}
	}
	for dp, was := range active {
		if was {
			continue
		}
		if s.idle[dp]++; s.idle[dp] < idleStreak {
			continue
		}
		switch held := s.m.Held(worker.Rank{Worker: record.ID, DP: dp}, now); {
		case !held:
			s.idle[dp] = idleStreak - 1
		case s.idle[dp] == idleStreak: // once, until it has had work again or holds nothing
			s.m.log.Warn("worker is idle but old reservations are held for it", "worker", record.Name, "dp_rank", dp)
		}
	}
}

// bookedUnder is the rank under which the tracker has the load of an engine's rank.
func bookedUnder(dp uint32, ranks int, record *worker.Worker) uint32 {
	switch {
	case record.DPSize == 0 && ranks == 1:
		return 0
	case record.RankRouting == worker.RankByEngine:
		return worker.AnyDP
	}
	return dp
}
