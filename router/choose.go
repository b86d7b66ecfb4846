package router

import (
	"math"
	"sort"
)

// Costs that are not a number belong to candidates that cannot be chosen.

// minimum is the lowest cost of some candidates: the first that has it, -1 if there is none, and
// how many have exactly that.
type minimum struct {
	cost        float64
	first, ties int
}

// nobody is the minimum of no candidates.
func nobody() minimum { return minimum{math.Inf(1), -1, 0} }

// add takes candidate i into account. It comes after those before it.
func (m *minimum) add(i int, cost float64) {
	if cost < m.cost || m.first < 0 && cost == m.cost { // infinite
		*m = minimum{cost, i, 1}
	} else if cost == m.cost {
		m.ties++
	}
}

func lowest(costs []float64) minimum {
	m := nobody()
	for i, c := range costs {
		m.add(i, c)
	}
	return m
}

// nth returns candidate n, from 0, of those with that cost.
func nth(costs []float64, cost float64, n int) int {
	for i, c := range costs {
		if c != cost {
			continue
		}
		if n == 0 {
			return i
		}
		n--
	}
	return -1
}

// draw returns a candidate by chance, -1 if there is none: u from [0, 1) decides. The best is
// e^(1/temperature) times as likely as the worst, whatever their distance, and others between
// them by where between them they are. temperature is above 0; shares is scratch, as long as costs.
func draw(costs, shares []float64, temperature, u float64) int {
	return drawAbove(lowest(costs), costs, shares, temperature, u)
}

// drawAbove is draw where the lowest of costs is known.
func drawAbove(best minimum, costs, shares []float64, temperature, u float64) int {
	if best.first < 0 {
		return -1
	}
	low, high := best.cost, math.Inf(-1)
	for _, c := range costs {
		if c > high {
			high = c
		}
	}
	unit := 1.0
	if math.IsInf(high-low, 0) {
		unit = max(math.Abs(low), math.Abs(high))
	}
	scale := (high/unit - low/unit) * temperature
	if !(scale > 0) { // all are equal, or as good as
		return nth(costs, low, min(int(u*float64(best.ties)), best.ties-1))
	}
	inverse := 1 / scale
	extreme := unit != 1 || math.IsInf(inverse, 0) // seldom: a division is as dear as all else but Exp
	sum, shares := 0.0, shares[:len(costs)]
	for i, c := range costs {
		if c >= low { // it can be chosen
			x := (low - c) * inverse
			if extreme {
				x = (low/unit - c/unit) / scale
			}
			sum += math.Exp(x)
		}
		shares[i] = sum
	}
	at := u * sum
	return sort.Search(len(shares)-1, func(i int) bool { return shares[i] >= at && shares[i] > 0 })
}
