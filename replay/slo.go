package replay

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// TTFTLimit is an objective for the time to the first token that grows with the prompt. The zero
// value is no objective.
type TTFTLimit struct {
	Constant        time.Duration
	Factor          float64 // times the prompt's time at TokensPerSecond; 0 is no such part
	TokensPerSecond float64
}

// ParseTTFT reads CONSTANT or CONSTANT+FACTORxRATE, as in 2s+2x20000. Empty is no objective.
func ParseTTFT(s string) (TTFTLimit, error) {
	if s == "" {
		return TTFTLimit{}, nil
	}
	constant, part, hasPart := strings.Cut(s, "+")
	var l TTFTLimit
	var err error
	if l.Constant, err = time.ParseDuration(constant); err != nil || l.Constant < 0 {
		return TTFTLimit{}, fmt.Errorf("%q does not begin with a duration such as 2s", s)
	}
	if !hasPart {
		if l.Constant == 0 {
			return TTFTLimit{}, errors.New("0 can never be met; leave it empty for no objective")
		}
		return l, nil
	}
	factor, rate, ok := strings.Cut(part, "x")
	if !ok {
		return TTFTLimit{}, fmt.Errorf("%q is not FACTORxRATE, as in 2x20000", part)
	}
	if l.Factor, err = strconv.ParseFloat(factor, 64); err != nil || !(l.Factor > 0 && l.Factor <= 1e6) {
		return TTFTLimit{}, fmt.Errorf("factor %q is not above 0 and at most 1000000", factor)
	}
	if l.TokensPerSecond, err = strconv.ParseFloat(rate, 64); err != nil || !(l.TokensPerSecond >= 1 && l.TokensPerSecond <= 1e9) {
		return TTFTLimit{}, fmt.Errorf("rate %q is not within 1..1000000000 tokens per second", rate)
	}
	return l, nil
}

// Limit returns the longest good time to the first token of a prompt of isl tokens, and false if
// there is no objective.
func (l TTFTLimit) Limit(isl int) (time.Duration, bool) {
	if l == (TTFTLimit{}) {
		return 0, false
	}
	d := l.Constant
	if l.Factor > 0 {
		d += time.Duration(l.Factor * float64(isl) / l.TokensPerSecond * float64(time.Second))
	}
	return d, true
}

// String returns what ParseTTFT reads.
func (l TTFTLimit) String() string {
	switch {
	case l == TTFTLimit{}:
		return ""
	case l.Factor == 0:
		return l.Constant.String()
	}
	return fmt.Sprintf("%v+%sx%s", l.Constant, strconv.FormatFloat(l.Factor, 'f', -1, 64),
		strconv.FormatFloat(l.TokensPerSecond, 'f', -1, 64))
}
