package router

import "math"

// Costs that are not a number belong to candidates that cannot be chosen.

// lowest returns the first candidate of the lowest cost, -1 if there is none, and how many have
// exactly that cost.
func lowest(costs []float64) (first, ties int) {
	first, best := -1, math.Inf(1)
	for i, c := range costs {
		if c < best {
			first, best, ties = i, c, 1
		} else if c == best {
			if ties++; first < 0 { // infinite
				first = i
			}
		}
	}
	return first, ties
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
// them by where between them they are. temperature is above 0; weights is scratch, as long as costs.
func draw(costs, weights []float64, temperature, u float64) int {
	best, ties := lowest(costs)
	if best < 0 {
		return -1
	}
	low, high := costs[best], math.Inf(-1)
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
		return nth(costs, low, min(int(u*float64(ties)), ties-1))
	}
	sum := 0.0
	for i, c := range costs {
		if weights[i] = 0; c >= low {
			weights[i] = math.Exp(-(c/unit - low/unit) / scale)
			sum += weights[i]
		}
	}
	last, left := -1, u*sum
	for i, w := range weights {
		if w == 0 {
			continue
		}
		if last, left = i, left-w; left <= 0 {
			return i
		}
	}
	return last
}
