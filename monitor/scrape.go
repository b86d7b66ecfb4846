package monitor

import (
	"context"
	"errors"
	"fmt"
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

// scraper is the loop that looks at one worker's metrics page.
type scraper struct {
	m        *KvWorkerMonitor
	w        *watch
	history  history
	failures int // in a row
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
	err := s.m.get.get(limit, record.MetricsURL, record.APIKey, "text/plain", func(body []byte, whole bool) error {
		return s.take(body, whole, record, sent)
	})
	if ctx.Err() != nil {
		return // forgotten meanwhile: what failed then is not the worker's fault
	}
	s.w.metrics.duration.Observe(time.Since(sent).Seconds())
	s.account(record, err)
}

// take hands a page to the busy list. An error that is partial means that the page was of use
// nevertheless.
func (s *scraper) take(body []byte, whole bool, record *worker.Worker, sent time.Time) error {
	p := readVLLM(body)
	if !whole {
		p.truncated, p.invalid = true, true
	}
	if p.truncated && len(p.ranks) < len(s.history.ranks) {
		// Which ranks are left out would decide what the others' labels mean.
		return &failure{reasonParse, fmt.Errorf("%s ended early", record.MetricsURL)}
	}
	restarted := s.history.restarted(p)
	if restarted {
		s.m.log.Info("worker was restarted: its earlier numbers are dropped", "worker", record.Name)
		clear(s.idle)
	}
	samples := s.history.samples(p, record, sent, s.m.cfg.EnginePrefillEstimate)
	usage := false
	for i := range samples {
		usage = usage || samples[i].KVUsageRatio != nil
	}
	if len(samples) > 0 || restarted {
		s.w.scraped(samples, restarted, p.asleep, time.Now())
		s.compare(samples, record, time.Now())
	}
	switch {
	case p.invalid:
		return &failure{reasonParse, partial(len(samples) > 0, "%s has unusable lines", record.MetricsURL)}
	case !usage:
		return &failure{reasonMissing, partial(len(samples) > 0,
			"%s has no vllm:kv_cache_usage_perc; is this a vLLM server's metrics page?", record.MetricsURL)}
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
