package busy

import "time"

// maxMark is the longest life of a mark.
const maxMark = 10 * time.Second

// mark remembers that a worker, or a rank, refused a request for capacity. The zero mark is
// none.
type mark struct {
	at       time.Time
	least    time.Time // it lasts until here whatever samples say
	most     time.Time // and never longer than this
	sampled  bool      // a sample taken after the mark was stored since the last verdict
	relieved bool      // such a sample led to the verdict "free"
}

func (m *mark) active() bool { return !m.at.IsZero() }

// set begins the mark, or begins it again: an earlier refusal's longer hold stays.
func (m *mark) set(now time.Time, hold time.Duration) {
	least := now.Add(min(hold, maxMark))
	if m.least.After(least) {
		least = m.least
	}
	*m = mark{at: now, least: least, most: now.Add(maxMark)}
}

// sample notes a sample: one that was on its way when the worker refused proves nothing.
func (m *mark) sample(takenAt time.Time) {
	if m.active() && takenAt.After(m.at) {
		m.sampled = true
	}
}

// settle takes in the verdict that was reached without regard to marks, and ends the mark if
// its time has come.
func (m *mark) settle(free bool, now time.Time) {
	if !m.active() {
		return
	}
	if m.sampled && free {
		m.relieved = true
	}
	m.sampled = false
	if !now.Before(m.end()) {
		*m = mark{}
	}
}

// end is when the mark ends if no further sample comes.
func (m *mark) end() time.Time {
	if m.relieved {
		return m.least
	}
	return m.most
}
