package budget

import "time"

// Patience measures how long one request at the head of its queue has been too large for the
// budget. Only time during which the gate was open counts. The zero Patience has waited for nobody.
type Patience struct {
	id     string
	waited time.Duration
	last   time.Time // zero if the gate was not open then
}

// Wait notes that the request is too large now, with the gate open, and returns how long it has been.
// Another request starts anew.
func (p *Patience) Wait(id string, now time.Time) time.Duration {
	if p.id != id {
		*p = Patience{id: id}
	}
	p.Pause(now)
	p.last = now
	return p.waited
}

// Pause is for times at which the gate is closed, until the next Wait: they do not count.
func (p *Patience) Pause(now time.Time) {
	if !p.last.IsZero() {
		p.waited += max(0, now.Sub(p.last))
	}
	p.last = time.Time{}
}

// Reset is for rounds in which no head is too large.
func (p *Patience) Reset() { *p = Patience{} }
