package replay

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// What a run must hold for its figures to mean something.
const (
	maxSendLagMS  = 5.0 // p99
	maxStepLateMS = 2.0 // p99, of simulated workers
	maxCores      = 1.3 // of this process and the --pids, on a machine of two
)

// Report is what a run found. Times are in milliseconds where the name ends in MS, else in seconds.
//
// Offered = Admitted + Shed + NotSent + CutOff; Admitted = Completed + Failed + Left. Requests sent
// during --warmup are in none of these.
type Report struct {
	Target      string  `json:"target"`
	Model       string  `json:"model"`
	Seed        uint64  `json:"seed"`
	Speed       float64 `json:"speed"`
	ArrivalHash string  `json:"arrival_hash"` // of all scheduled requests, sent or not
	Scheduled   int     `json:"scheduled"`
	Warmup      int     `json:"warmup_requests"`
	Interrupted bool    `json:"interrupted"`

	Offered   int     `json:"offered"` // requests that became due
	Admitted  int     `json:"admitted"`
	Completed int     `json:"completed"`
	Left      int     `json:"left"`     // clients that went on purpose
	NotSent   int     `json:"not_sent"` // due while --max-in-flight were open
	CutOff    int     `json:"cut_off"`  // in flight when the run was interrupted
	Shed      int     `json:"shed"`
	ShedBy    []Share `json:"shed_by_reason"` // shares of Offered
	Failed    int     `json:"failed"`
	FailedBy  []Share `json:"failed_by_kind"` // shares of Offered

	WindowSeconds float64 `json:"window_seconds"` // from the first to the last due arrival
	TotalSeconds  float64 `json:"total_seconds"`  // from the first due arrival to the last completion
	OfferedRate   float64 `json:"offered_per_second"`

	TTFT      Quantiles   `json:"ttft"` // of completed requests, from due
	TTFTByISL []ISLBucket `json:"ttft_by_isl"`
	ITL       Quantiles   `json:"itl"` // of all gaps between content events of completed requests

	SLO     SLO        `json:"slo"`
	Goodput Throughput `json:"goodput"` // of requests that met the SLO, over the window
	Drain   Throughput `json:"drain"`   // of all completed requests, over the total

	PromptTokens int     `json:"prompt_tokens"` // of completed requests, as the endpoint counts
	OutputTokens int     `json:"output_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	CachedShare  float64 `json:"cached_share"`        // of PromptTokens
	EndlessShare float64 `json:"endless_cache_share"` // what one worker that forgets nothing could find of all scheduled prompts
	Oracle       *Oracle `json:"oracle,omitempty"`    // if a worker was asked
	WithoutUsage int     `json:"without_usage"`       // completed; counted from the trace and events
	TooShort     int     `json:"too_short"`           // completed with fewer output tokens than asked for

	Lifecycle *Lifecycle `json:"lifecycle,omitempty"` // of reservations, if the selection service was asked

	Workers  []Share    `json:"workers"` // answers other than shed that named a worker
	SendLag  Quantiles  `json:"send_lag"`
	CPU      CPU        `json:"cpu"`
	Sims     []SimStats `json:"sims"`
	Validity Validity   `json:"validity"`
}

// Quantiles are percentiles by nearest rank, within 0.4%; the maximum is exact.
type Quantiles struct {
	Count uint64  `json:"count"`
	P50MS float64 `json:"p50_ms"`
	P90MS float64 `json:"p90_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

// ISLBucket is the TTFT of completed requests with more than Above and at most UpTo prompt tokens.
type ISLBucket struct {
	Above int       `json:"isl_above"`
	UpTo  int       `json:"isl_up_to"` // 0 is no end
	TTFT  Quantiles `json:"ttft"`
}

// SLO is the objective and how many requests met it. One that was admitted and did not complete
// has not met it.
type SLO struct {
	TTFT       string  `json:"ttft"`   // as ParseTTFT reads it; empty is none
	ITLMS      float64 `json:"itl_ms"` // 0 is none
	Met        int     `json:"met"`
	MetShare   float64 `json:"met_share"`   // of Admitted
	MissedTTFT int     `json:"missed_ttft"` // completed requests; one may miss both
	MissedITL  int     `json:"missed_itl"`
}

// Throughput is work per second.
type Throughput struct {
	Requests     float64 `json:"requests_per_second"`
	PromptTokens float64 `json:"prompt_tokens_per_second"`
	OutputTokens float64 `json:"output_tokens_per_second"`
	AllTokens    float64 `json:"tokens_per_second"` // prompt and output
}

// Share is how many of a whole had a name, most first.
type Share struct {
	Name  string  `json:"name"`
	Count int     `json:"count"`
	Share float64 `json:"share"`
}

// CPU is the CPU time used from the first due arrival to the end of the last request.
type CPU struct {
	WallSeconds float64      `json:"wall_seconds"`
	OwnSeconds  float64      `json:"own_seconds"` // of this process
	Processes   []ProcessCPU `json:"processes"`
	Missing     []int        `json:"missing"` // processes that ended before the run did
	Cores       float64      `json:"cores"`   // own and processes together, over wall
}

// ProcessCPU is the CPU time of one of the --pids.
type ProcessCPU struct {
	PID     int     `json:"pid"`
	Seconds float64 `json:"seconds"`
}

func newReport(r *run, interrupted bool) Report {
	t := r.tally
	t.mu.Lock()
	defer t.mu.Unlock()
	rep := Report{
		Target: r.cfg.target(), Model: r.cfg.Model, Seed: r.cfg.Seed, Speed: r.cfg.Speed,
		ArrivalHash: ArrivalHash(r.reqs), Scheduled: len(r.reqs), Warmup: r.warmup, Interrupted: interrupted,
		Offered: t.offered, Completed: t.completed, Left: t.left, NotSent: t.notSent, CutOff: t.cutOff,
		Shed: total(t.shedBy), ShedBy: shares(t.shedBy, t.offered),
		Failed: total(t.failedBy), FailedBy: shares(t.failedBy, t.offered),
		TTFT: quantiles(&t.ttft), ITL: quantiles(&t.itl), SendLag: quantiles(&t.lag),
		PromptTokens: t.all.prompt, OutputTokens: t.all.output, CachedTokens: t.cachedTokens,
		CachedShare:  over(float64(t.cachedTokens), float64(t.all.prompt)),
		EndlessShare: endlessCacheShare(r.reqs), Oracle: t.oracle.report(),
		WithoutUsage: t.withoutUsage, TooShort: t.tooShort,
		Workers: shares(t.workers, total(t.workers)), CPU: newCPU(r.cpuUsed),
	}
	rep.Admitted = rep.Completed + rep.Failed + rep.Left
	rep.WindowSeconds = t.lastDue.Sub(t.firstDue).Seconds()
	if t.completed > 0 {
		rep.TotalSeconds = t.lastEnd.Sub(t.firstDue).Seconds()
	}
	window := rep.WindowSeconds
	if window == 0 {
		window = rep.TotalSeconds // all were due at one time
	}
	rep.OfferedRate = over(float64(t.offered), window)
	rep.Goodput = throughput(t.good, window)
	rep.Drain = throughput(t.all, rep.TotalSeconds)
	rep.SLO = SLO{
		TTFT: t.limitTTFT.String(), ITLMS: ms(t.limitITL), Met: t.good.requests,
		MetShare:   over(float64(t.good.requests), float64(rep.Admitted)),
		MissedTTFT: t.missedTTFT, MissedITL: t.missedITL,
	}
	rep.TTFTByISL = byISL(&t.sums)
	return rep
}

func newCPU(u cpuUse) CPU {
	c := CPU{WallSeconds: u.wall.Seconds(), OwnSeconds: u.own.Seconds(), Processes: []ProcessCPU{}, Missing: append([]int{}, u.missing...)}
	sum := u.own
	for _, pid := range slices.Sorted(maps.Keys(u.pids)) {
		c.Processes = append(c.Processes, ProcessCPU{pid, u.pids[pid].Seconds()})
		sum += u.pids[pid]
	}
	c.Cores = over(sum.Seconds(), c.WallSeconds)
	return c
}

func byISL(t *sums) []ISLBucket {
	all := []ISLBucket{}
	above := 0
	for i := range t.ttftByISL {
		b := ISLBucket{Above: above, TTFT: quantiles(&t.ttftByISL[i])}
		if i < len(islBounds) {
			b.UpTo = islBounds[i]
		}
		above = b.UpTo
		if b.TTFT.Count > 0 {
			all = append(all, b)
		}
	}
	return all
}

func throughput(t tokens, seconds float64) Throughput {
	return Throughput{
		Requests:     over(float64(t.requests), seconds),
		PromptTokens: over(float64(t.prompt), seconds),
		OutputTokens: over(float64(t.output), seconds),
		AllTokens:    over(float64(t.prompt+t.output), seconds),
	}
}

func quantiles(h *Histogram) Quantiles {
	return Quantiles{h.Count(), ms(h.Percentile(50)), ms(h.Percentile(90)), ms(h.Percentile(99)), ms(h.Max())}
}

func shares(by map[string]int, of int) []Share {
	all := []Share{} // [] in JSON, not null
	for name, n := range by {
		all = append(all, Share{name, n, over(float64(n), float64(of))})
	}
	slices.SortFunc(all, func(a, b Share) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Name, b.Name))
	})
	return all
}

func total(by map[string]int) int {
	sum := 0
	for _, n := range by {
		sum += n
	}
	return sum
}

// over is a/b, and 0 where there is nothing to divide by, which JSON cannot say otherwise.
func over(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return a / b
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Validity says whether the measurement can be believed.
type Validity struct {
	OK     bool    `json:"ok"` // every check is ok
	Checks []Check `json:"checks"`
}

// Check is one condition of validity.
type Check struct {
	Name    string `json:"name"`
	Verdict string `json:"verdict"` // ok, failed or unknown
	Detail  string `json:"detail"`  // the figure and its limit, or why it is unknown
}

// newValidity judges r. withPIDs says whether the CPU of what was measured is known at all.
func newValidity(r *Report, withPIDs bool) Validity {
	v := Validity{OK: true}
	judge := func(name string, value, limit float64, unit, unknown string) {
		c := Check{Name: name, Verdict: "ok", Detail: fmt.Sprintf("%.3g%s of at most %.3g%s", value, unit, limit, unit)}
		switch {
		case unknown != "":
			c.Verdict, c.Detail = "unknown", unknown
		case value > limit:
			c.Verdict = "failed"
		}
		v.OK = v.OK && c.Verdict == "ok"
		v.Checks = append(v.Checks, c)
	}
	late, unknown := worstStep(r.Sims)
	judge("step lateness p99", late, maxStepLateMS, " ms", unknown)
	unknown = ""
	if r.SendLag.Count == 0 {
		unknown = "nothing was sent"
	}
	judge("send lag p99", r.SendLag.P99MS, maxSendLagMS, " ms", unknown)
	unknown = ""
	switch {
	case len(r.CPU.Missing) > 0:
		unknown = fmt.Sprintf("processes %v ended before the run did", r.CPU.Missing)
	case !withPIDs:
		unknown = "no --pids given"
	}
	judge("CPU", r.CPU.Cores, maxCores, " cores", unknown)
	judge("not sent for --max-in-flight", float64(r.NotSent), 0, " requests", "")
	judge("cut off by interruption", float64(r.Scheduled-r.Warmup-r.Offered+r.CutOff), 0, " requests", "")
	return v
}

// worstStep returns the largest p99 of step lateness, or why there is none.
func worstStep(sims []SimStats) (worst float64, unknown string) {
	if len(sims) == 0 {
		return 0, "no --stats-url given"
	}
	for _, s := range sims {
		if s.StepP99MS == nil {
			return 0, fmt.Sprintf("%s: %s", s.URL, s.Error)
		}
		worst = max(worst, *s.StepP99MS)
	}
	return worst, ""
}
