package tokenize

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	lies   = 3  // wrong counts in a row after which IDs are not trusted
	truths = 20 // right counts in a row after which they are again
)

// model is what is remembered of a model of a tenant. There is one for each that prompts were of;
// names that no worker has do not come so far.
type model struct {
	countOnly  bool
	wrong      int    // counts in a row
	right      int    // counts in a row, while countOnly
	generation uint64 // of what is cached: that of earlier ones is not found any more
	forgotten  time.Time

	ratio    prometheus.Observer
	withheld prometheus.Gauge
}

func (t *Tokenizer) modelLocked(name, tenant string) *model {
	m := t.models[partition{name, tenant}]
	if m == nil {
		m = &model{ratio: t.metrics.ratio.WithLabelValues(name), withheld: t.metrics.countOnly.WithLabelValues(name)}
		t.models[partition{name, tenant}] = m
	}
	return m
}

// Counted takes in how many prompt tokens a request had that is over, by its usage, where Tokenize had
// told a Count of Text. If that was wrong three times in a row, the IDs are not what the worker computes
// either: its chat template has changed, or gets other arguments. They are withheld, and Count alone is
// told, until it was right 20 times in a row.
func (t *Tokenizer) Counted(name, tenant string, counted, actual uint64) {
	if counted == 0 || actual == 0 {
		return
	}
	t.mu.Lock()
	m := t.modelLocked(name, tenant)
	changed := m.counted(counted == actual, time.Now())
	countOnly := m.countOnly
	t.mu.Unlock()
	m.ratio.Observe(math.Abs(float64(counted)-float64(actual)) / float64(actual))
	switch {
	case !changed:
	case countOnly:
		m.withheld.Inc()
		t.log.Warn("prompts are tokenised otherwise than by their workers: no prefix is looked up by such tokens until counts are right again",
			"model", name, "tenant", tenant, "counted", counted, "actual", actual)
	default:
		m.withheld.Dec()
		t.log.Info("prompts are tokenised as by their workers again", "model", name, "tenant", tenant)
	}
}

// counted takes in one count, and tells whether countOnly has changed.
func (m *model) counted(ok bool, now time.Time) bool {
	if ok {
		m.wrong = 0
		if !m.countOnly {
			return false
		}
		if m.right++; m.right < truths {
			return false
		}
		m.countOnly, m.right = false, 0
		return true
	}
	m.right = 0
	if m.wrong++; m.wrong < lies {
		return false
	}
	m.wrong = 0
	if m.forgotten.IsZero() || now.Sub(m.forgotten) >= probeAgain { // what is wrong may be as old as the cache
		m.generation++
		m.forgotten = now
	}
	changed := !m.countOnly
	m.countOnly = true
	return changed
}
