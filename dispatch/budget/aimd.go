package budget

import "time"

// AIMD is a limit on requests in flight that follows from answers alone, for where nothing else tells
// how much is free: it grows by Increase for as many successes as it is large, and falls to the part
// Decrease of itself when a request is refused for overload, once for all that were sent before. It
// begins at Least. It is not safe for concurrent use.
type AIMD struct {
	Least, Most float64 // at least 1
	Increase    float64 // above 0
	Decrease    float64 // above 0, below 1

	limit float64 // 0 is Least
	cut   time.Time
}

func (a *AIMD) set(limit float64) { a.limit = min(max(limit, a.Least), a.Most) }

// Limit is how many requests may be in flight now.
func (a *AIMD) Limit() int { return int(max(a.limit, a.Least)) }

// Succeeded notes a success.
func (a *AIMD) Succeeded() {
	at := max(a.limit, a.Least)
	a.set(at + a.Increase/at)
}

// Refused notes that a request that was sent at a time was refused for overload. Those that were sent
// before the limit last fell tell nothing of the present one.
func (a *AIMD) Refused(sentAt, now time.Time) {
	if sentAt.Before(a.cut) {
		return
	}
	a.cut = now
	a.set(max(a.limit, a.Least) * a.Decrease)
}
