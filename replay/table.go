package replay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// write prints the report to out and, if path is a file, stores it there as JSON too.
func write(r Report, path string, out io.Writer) error {
	encoded, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("replay: encode report: %w", err)
	}
	encoded = append(encoded, '\n')
	text := []byte(r.String())
	switch path {
	case "":
	case "-":
		text = encoded
	default:
		if err := os.WriteFile(path, encoded, 0o644); err != nil {
			return fmt.Errorf("replay: write report: %w", err)
		}
	}
	if _, err := out.Write(text); err != nil {
		return fmt.Errorf("replay: print report: %w", err)
	}
	return nil
}

// table collects rows of a name and its figures.
type table struct{ bytes.Buffer }

func (t *table) row(name, format string, args ...any) {
	fmt.Fprintf(t, "%-16s %s\n", name, fmt.Sprintf(format, args...))
}

// String returns the report as a table for people.
func (r Report) String() string {
	var t table
	r.requestRows(&t)
	r.latencyRows(&t)
	r.rateRows(&t)
	r.runRows(&t)
	return t.Buffer.String()
}

func (r Report) requestRows(t *table) {
	t.row("target", "%s, model %s", r.Target, r.Model)
	t.row("arrivals", "%d, hash %s, seed %d, speed %g", r.Scheduled, r.ArrivalHash, r.Seed, r.Speed)
	if r.Interrupted {
		t.row("interrupted", "%d were never due, %d were cut off", r.Scheduled-r.Warmup-r.Offered, r.CutOff)
	}
	if r.Warmup > 0 {
		t.row("warm-up", "%d requests, not counted below", r.Warmup)
	}
	t.row("offered", "%d in %.1f s from first to last due, %.3f/s", r.Offered, r.WindowSeconds, r.OfferedRate)
	t.row("admitted", "%d %s: completed %d, failed %d, left %d", r.Admitted, percent(r.Admitted, r.Offered), r.Completed, r.Failed, r.Left)
	t.row("shed", "%d %s%s", r.Shed, percent(r.Shed, r.Offered), list(r.ShedBy))
	t.row("failed", "%d %s%s", r.Failed, percent(r.Failed, r.Offered), list(r.FailedBy))
	if r.NotSent > 0 {
		t.row("not sent", "%d %s, due while --max-in-flight were open", r.NotSent, percent(r.NotSent, r.Offered))
	}
}

func (r Report) latencyRows(t *table) {
	t.row("TTFT", "%s (completed, from due)", r.TTFT)
	for _, b := range r.TTFTByISL {
		bounds := fmt.Sprintf("ISL <= %d", b.UpTo)
		if b.UpTo == 0 {
			bounds = fmt.Sprintf("ISL > %d", b.Above)
		}
		t.row("  "+bounds, "p50 %s, p99 %s of %d", duration(b.TTFT.P50MS), duration(b.TTFT.P99MS), b.TTFT.Count)
	}
	t.row("ITL", "%s (completed, all gaps)", r.ITL)
}

func (r Report) rateRows(t *table) {
	var slo []string
	if r.SLO.TTFT != "" {
		slo = append(slo, "TTFT "+r.SLO.TTFT)
	}
	if r.SLO.ITLMS > 0 {
		slo = append(slo, "ITL p99 "+duration(r.SLO.ITLMS))
	}
	if len(slo) == 0 {
		slo = []string{"none: all that completed count as good"}
	}
	t.row("SLO", "%s", strings.Join(slo, ", "))
	t.row("met SLO", "%d of %d admitted %s; completed but missed TTFT %d, ITL %d", r.SLO.Met, r.Admitted,
		percent(r.SLO.Met, r.Admitted), r.SLO.MissedTTFT, r.SLO.MissedITL)
	t.row("goodput", "%s (met SLO, over %.1f s from first to last due)", r.Goodput, r.WindowSeconds)
	t.row("drain rate", "%s (completed, over %.1f s until the last completion)", r.Drain, r.TotalSeconds)
	t.row("cached", "%d of %d prompt tokens %s", r.CachedTokens, r.PromptTokens, percent(r.CachedTokens, r.PromptTokens))
	t.row("", "%.1f%% could be in a cache that forgets nothing", 100*r.EndlessShare)
	if o := r.Oracle; o != nil {
		t.row("oracle", "%d tokens (%.1f%%) were cached on some rank when their request came, of which %.1f%% were found (%d requests, %d not known)",
			o.BestTokens, 100*o.BestShare, 100*o.OfBest, o.Requests, o.Unknown)
	}
	if r.WithoutUsage > 0 {
		t.row("without usage", "%d completed; their tokens are from the trace and counted events", r.WithoutUsage)
	}
	if r.TooShort > 0 {
		t.row("too short", "%d completed with fewer tokens than asked for", r.TooShort)
	}
	for i, w := range r.Workers {
		if i == maxWorkerRows {
			t.row("  others", "%d workers, see --json", len(r.Workers)-i)
			break
		}
		t.row("worker", "%s: %d (%.1f%%)", w.Name, w.Count, 100*w.Share)
	}
}

// maxWorkerRows bounds the table; the JSON has all.
const maxWorkerRows = 32

func (r Report) runRows(t *table) {
	if l := r.Lifecycle; l != nil {
		t.row("reservations", "%d made, %d told of their first token, %d freed, %d calls about them failed", l.Selected, l.PrefillCompleted, l.Freed, l.Failed)
		t.row("selection", "%s", l.Latency)
	}
	t.row("send lag", "%s", r.SendLag)
	t.row("CPU", "%.2f cores over %.1f s: replay %.2f s", r.CPU.Cores, r.CPU.WallSeconds, r.CPU.OwnSeconds)
	for _, p := range r.CPU.Processes {
		t.row("", "process %d %.2f s", p.PID, p.Seconds)
	}
	for _, s := range r.Sims {
		if s.StepP99MS == nil {
			t.row("step lateness", "%s: unknown: %s", s.URL, s.Error)
			continue
		}
		t.row("step lateness", "%s: p50 %s, p99 %s, max %s; prefilled %d tokens, %d from the cache", s.URL, duration(*s.StepP50MS), duration(*s.StepP99MS), duration(*s.StepMaxMS), s.Computed, s.Cached)
	}
	t.row("validity:", "%s", r.Validity)
}

// String says ok, or which checks are not.
func (v Validity) String() string {
	if v.OK {
		return "ok"
	}
	var bad []string
	for _, c := range v.Checks {
		if c.Verdict != "ok" {
			bad = append(bad, fmt.Sprintf("%s %s (%s)", c.Name, c.Verdict, c.Detail))
		}
	}
	return strings.Join(bad, "; ")
}

// String returns the percentiles in a fitting unit.
func (q Quantiles) String() string {
	if q.Count == 0 {
		return "none"
	}
	return fmt.Sprintf("p50 %s, p90 %s, p99 %s, max %s", duration(q.P50MS), duration(q.P90MS), duration(q.P99MS), duration(q.MaxMS))
}

// String returns all rates on one line.
func (p Throughput) String() string {
	return fmt.Sprintf("%.3f req/s, %.0f prompt + %.0f output = %.0f tokens/s", p.Requests, p.PromptTokens, p.OutputTokens, p.AllTokens)
}

func duration(ms float64) string {
	if ms >= 1000 {
		return fmt.Sprintf("%.2f s", ms/1000)
	}
	return fmt.Sprintf("%.2f ms", ms)
}

func percent(n, of int) string {
	return fmt.Sprintf("(%.1f%%)", 100*over(float64(n), float64(of)))
}

func list(all []Share) string {
	var b strings.Builder
	for i, s := range all {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&b, "%s%s %d (%.1f%%)", sep, s.Name, s.Count, 100*s.Share)
	}
	return b.String()
}
