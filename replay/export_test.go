package replay

import (
	"math"
	"time"
)

// Stream is what an answer was understood to be.
type Stream struct {
	Contents                int
	Gaps                    []time.Duration
	Done, Failed, Malformed bool
	Prompt, Output, Cached  int
	HasUsage                bool
}

// FeedStream feeds pieces, a millisecond apart, and returns what they were understood to be.
func FeedStream(pieces ...string) Stream {
	var s stream
	for i, p := range pieces {
		s.feed([]byte(p), time.Unix(0, 0).Add(time.Duration(i)*time.Millisecond))
	}
	got := Stream{Gaps: s.gaps, Done: s.done, Failed: s.failed, Malformed: s.malformed, HasUsage: s.hasUsage,
		Prompt: s.usage.PromptTokens, Output: s.usage.CompletionTokens, Cached: s.usage.Details.CachedTokens}
	if !s.first.IsZero() {
		got.Contents = len(s.gaps) + 1
	}
	return got
}

// Complete returns the report of one request of isl tokens that was sent lag after it was due and
// whose content came at the given times after that.
func Complete(cfg Config, isl int, lag time.Duration, at ...time.Duration) Report {
	t := newTally(cfg)
	due := time.Unix(1_700_000_000, 0)
	s := stream{done: true}
	for _, d := range at {
		s.content(due.Add(lag + d))
	}
	t.offer(due, true)
	t.add(&Request{ISLTokens: isl, OSLTokens: len(at)}, due, result{sent: true, lag: lag, end: s.last}, &s)
	return newReport(&run{cfg: cfg, tally: t}, false)
}

// TraceTime is the integral of the speed that a profile has, by small steps: the slow way to what
// realTime inverts.
func TraceTime(profile string, speed float64, real time.Duration) (time.Duration, error) {
	p, err := parseProfile(profile)
	if err != nil {
		return 0, err
	}
	const steps = 100_000
	sum := 0.0
	for i := range steps {
		sum += speed * (1 + p.amplitude*math.Sin(2*math.Pi*real.Seconds()*(float64(i)+0.5)/steps/p.period))
	}
	return time.Duration(sum / steps * float64(real)), nil
}
