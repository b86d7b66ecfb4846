package dispatch

import (
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	backoffBase = 2.0 // seconds
	backoffMost = 60.0
	shedBackoff = 4 // sheds in a row that still lengthen the delay: the latch does the real work
)

// backoff is how long to wait before retry k, counted from 1, of a request whose deadline is left
// away; false if that is not in the future. It is uniform in [t/2, t) with t = min(2 s x 2^k, 60 s,
// left). A hint by Retry-After that is longer wins, but for half of what is left at most, and up to a
// quarter more, so that those who were refused together do not come back together.
func backoff(k int, left, hint time.Duration, rng *rand.Rand) (time.Duration, bool) {
	if left <= 0 {
		return 0, false
	}
	t := min(backoffMost, left.Seconds(), backoffBase*math.Exp2(float64(k)))
	delay := t/2 + rng.Float64()*t/2
	if hint.Seconds() > delay {
		delay = max(delay, min(hint.Seconds(), left.Seconds()/2)*(1+rng.Float64()/4))
	}
	return time.Duration(delay * float64(time.Second)), true
}

// retryAfter reads that header: seconds or a date, 0 for what is past or nonsense.
func retryAfter(v string, now time.Time) time.Duration {
	v = strings.TrimSpace(v)
	if n, err := strconv.ParseInt(v, 10, 64); err == nil {
		return time.Duration(min(max(n, 0), math.MaxInt64/int64(time.Second))) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(0, at.Sub(now))
	}
	return 0
}

// verdict is what an answer means for its request.
type verdict uint8

const (
	final     verdict = iota // the answer is the result
	again                    // try again, and count the attempt
	refused                  // for overload: try again, and close the gate
	overtaken                // refused for a reason that says nothing of load: try again
)

// judge tells what a status and the reason for a refusal mean.
func judge(status int, reason string, exempt []string) verdict {
	switch status {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, 529:
		for _, r := range exempt {
			if r == reason {
				return overtaken
			}
		}
		return refused
	case http.StatusRequestTimeout, http.StatusTooEarly:
		return again
	}
	if status >= 500 {
		return again
	}
	return final
}
