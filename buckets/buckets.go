// Package buckets makes the bounds of histograms: the documented ones, or those of an operator
// who reshapes them by variables of the environment.
package buckets

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Prefix begins the variables: SPILLWAY_HISTOGRAM_<NAME>_MIN, _MAX and _COUNT, where NAME is the
// name of the metric without its family's prefix, in capitals.
const Prefix = "SPILLWAY_HISTOGRAM_"

// maxCount is the most bounds that a histogram may be given.
const maxCount = 512

// Shapes are the reshaped histograms of one process. A nil *Shapes reshapes none. It is for one
// goroutine, while the process is being built.
type Shapes struct {
	given map[string]map[string]string // NAME -> MIN, MAX or COUNT -> text
	known map[string]bool              // NAME of histograms that were asked for
	bad   []string
}

// FromEnviron finds the variables in an environment of KEY=value.
func FromEnviron(environ []string) *Shapes {
	s := &Shapes{given: map[string]map[string]string{}, known: map[string]bool{}}
	for _, kv := range environ {
		key, value, _ := strings.Cut(kv, "=")
		rest, ok := strings.CutPrefix(key, Prefix)
		if !ok {
			continue
		}
		i := strings.LastIndexByte(rest, '_')
		if i < 0 || !slices.Contains([]string{"MIN", "MAX", "COUNT"}, rest[i+1:]) {
			s.bad = append(s.bad, key+": ends in none of _MIN, _MAX and _COUNT")
			continue
		}
		if s.given[rest[:i]] == nil {
			s.given[rest[:i]] = map[string]string{}
		}
		s.given[rest[:i]][rest[i+1:]] = value
	}
	return s
}

// Of returns the bounds of the histogram of that name (without prefix, as in the metric): those
// that were asked for, else def, which must not be empty. What is left out of MIN, MAX and COUNT
// is that of def: its first bound above 0, its last bound, its number of bounds.
func (s *Shapes) Of(name string, def []float64) []float64 {
	if s == nil {
		return def
	}
	key := strings.ToUpper(name)
	s.known[key] = true
	given := s.given[key]
	if given == nil {
		return def
	}
	least, most, count := def[0], def[len(def)-1], len(def)
	if least == 0 && len(def) > 1 {
		least = def[1]
	}
	var errs [3]error
	if v, ok := given["MIN"]; ok {
		least, errs[0] = strconv.ParseFloat(v, 64)
	}
	if v, ok := given["MAX"]; ok {
		most, errs[1] = strconv.ParseFloat(v, 64)
	}
	if v, ok := given["COUNT"]; ok {
		count, errs[2] = strconv.Atoi(v)
	}
	ok := errs == [3]error{} && least > 0 && least < most && !math.IsInf(most, 0) && count >= 1 && count <= maxCount // NaN fails
	if !ok {
		s.bad = append(s.bad, fmt.Sprintf("%s%s_MIN, _MAX, _COUNT: want 0 < MIN < MAX and 1 <= COUNT <= %d", Prefix, key, maxCount))
		return def
	}
	return spaced(least, most, count)
}

// spaced returns count bounds: 0, and on a logarithmic scale steps from least, which itself is
// none, to most, each rounded to 2 significant digits, without duplicates.
func spaced(least, most float64, count int) []float64 {
	bounds := []float64{0}
	from, span := math.Log(least), math.Log(most)-math.Log(least)
	for i := 1; i < count; i++ {
		v := rounded(math.Exp(from + span*float64(i)/float64(count-1)))
		if v > bounds[len(bounds)-1] && !math.IsInf(v, 0) {
			bounds = append(bounds, v)
		}
	}
	return bounds
}

// rounded is v to 2 significant digits. By way of the decimal text the result is the float64
// that is closest to them.
func rounded(v float64) float64 {
	r, err := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 1, 64), 64)
	if err != nil {
		return math.Inf(1)
	}
	return r
}

// Warnings are lines for the log: variables that have no effect. It is called when all histograms
// have been made.
func (s *Shapes) Warnings() []string {
	if s == nil {
		return nil
	}
	all := slices.Clone(s.bad)
	for name := range s.given {
		if !s.known[name] {
			all = append(all, Prefix+name+": there is no such histogram")
		}
	}
	slices.Sort(all)
	return all
}
