// Package budget decides how many batch requests may be sent now: from the capacity that a pool has
// to spare, from what was sent and is not yet seen there, and from refusals for overload. It is
// pure: callers pass the time, and what it decides it returns.
package budget

import (
	"fmt"
	"math"
)

// Unit is what capacity is counted in, and with it the weight of a request.
type Unit uint8

// The units.
const (
	Requests Unit = iota // every request weighs 1
	Tokens               // prompt and reserved output
	Bytes                // of the body as it is sent
)

var units = [...]string{Requests: "requests", Tokens: "tokens", Bytes: "bytes"}

// String is the unit's name in settings.
func (u Unit) String() string { return units[u] }

// ParseUnit finds a unit by its name.
func ParseUnit(name string) (Unit, error) {
	for u, n := range units {
		if n == name {
			return Unit(u), nil
		}
	}
	return 0, fmt.Errorf("%q is none of requests, tokens, bytes", name)
}

// Rounding is how the real-valued N becomes a whole number.
type Rounding uint8

// The ways of rounding. A remainder within rounding error of a whole number always counts as that
// number: 100 x (0.1 - 0.05) is 5 and not 4.999999999999997.
const (
	// FloorMin1 rounds down, but N is at least 1: values just above the baseline must not stop
	// everything, and one request that is sent and not yet seen uses that up. In tokens and bytes
	// it is Floor: there N is a hard bound, and Patience sees to heads that are too large.
	FloorMin1 Rounding = iota
	Floor
	Ceil
)

var roundings = [...]string{FloorMin1: "floor_min1", Floor: "floor", Ceil: "ceil"}

// ParseRounding finds a rounding by its name.
func ParseRounding(name string) (Rounding, error) {
	for r, n := range roundings {
		if n == name {
			return Rounding(r), nil
		}
	}
	return 0, fmt.Errorf("%q is none of floor_min1, floor, ceil", name)
}

// State is what a gate says.
type State uint8

// The states, the weaker ones first: of several gates the strongest state counts.
const (
	Open       State = iota
	Baseline         // what is free is reserved for others
	Failed           // a gate could not be asked
	NoCapacity       // there is no worker
	Unreadable       // how much is free is not known
	Overload         // requests were refused, and no newer reading tells of room
)

var states = [...]string{
	Open: "open", Baseline: "baseline", Failed: "error", NoCapacity: "no_capacity", Unreadable: "unreadable", Overload: "overload",
}

// States are all of them.
var States = []State{Open, Baseline, Unreadable, NoCapacity, Overload, Failed}

// String is the state's name in metrics and answers.
func (s State) String() string { return states[s] }

// tolerance is how near D may be to the baseline and still be on it: 1 - 0.95 is more than 0.05 in
// float64.
const tolerance = 1e-9

// slack is how much a product of N's size may be off, and more.
func slack(n float64) float64 { return max(1e-9, n*1e-12) }

// Rule makes a budget of a reading. The zero Rule reserves nothing and counts requests.
type Rule struct {
	Baseline float64 // B, the reserved part of D, 0 to 1: nothing is sent while D <= B
	Unit     Unit
	Rounding Rounding
	Share    float64 // this dispatcher's part of N, above 0 up to 1; 0 is 1
}

// Evaluate returns how much may be sent now. d is the free part of the capacity and maxSys the
// capacity in the rule's unit; what is NaN or infinite is not known, and then nothing may be sent.
// sent is the weight that d cannot show yet, and n the real-valued N = maxSys x (D - B) x share, 0
// if there is none. allowed is at least 0; beyond 2^62 it stays there.
func (r Rule) Evaluate(d, maxSys float64, sent int64, overload bool) (state State, n float64, allowed int64) {
	known := !math.IsNaN(d) && !math.IsInf(d, 0) && !math.IsNaN(maxSys) && !math.IsInf(maxSys, 0)
	switch {
	case overload:
		state = Overload
	case !known:
		state = Unreadable
	case maxSys <= 0:
		state = NoCapacity
	}
	if !known || maxSys <= 0 {
		return state, 0, 0
	}
	share := r.Share
	if share == 0 {
		share = 1
	}
	over := min(max(d, 0), 1) - r.Baseline
	if over <= tolerance {
		return max(state, Baseline), 0, 0
	}
	n = maxSys * over * share
	if state != Open {
		return state, n, 0
	}
	return Open, n, max(0, r.whole(n)-sent)
}

// whole rounds n.
func (r Rule) whole(n float64) int64 {
	const most = 1 << 62
	if n >= most {
		return most
	}
	if r.Rounding == Ceil {
		return int64(math.Ceil(n - slack(n)))
	}
	down := int64(math.Floor(n + slack(n)))
	if down == 0 && r.Rounding == FloorMin1 && r.Unit == Requests {
		return 1
	}
	return down
}

// Fits returns how many of the requests with the given weights, in the order in which they are to go,
// may go together: the longest prefix whose sum is at most allowed. It does not look past the
// first that does not fit: smaller ones behind would starve it, and break the order.
func Fits(weights []int64, allowed int64) int {
	for i, w := range weights {
		if w > allowed {
			return i
		}
		allowed -= w
	}
	return len(weights)
}
