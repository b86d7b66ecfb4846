package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// SimStats is how punctual the simulated workers of one process have been since it started.
type SimStats struct {
	URL       string   `json:"url"`
	StepP50MS *float64 `json:"step_lateness_p50_ms"` // nil if not known
	StepP99MS *float64 `json:"step_lateness_p99_ms"`
	StepMaxMS *float64 `json:"step_lateness_max_ms"`
	Computed  uint64   `json:"prefill_tokens_computed"`
	Cached    uint64   `json:"prefill_tokens_cached"`
	Error     string   `json:"error,omitempty"` // why not known
}

// simStats asks each URL once; what goes wrong is part of the answer.
func simStats(ctx context.Context, urls []string) []SimStats {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	all := []SimStats{}
	for _, u := range urls {
		s, err := oneSim(ctx, &http.Client{Transport: transport}, u)
		if err != nil {
			s.Error = err.Error()
		}
		all = append(all, s)
	}
	return all
}

func oneSim(ctx context.Context, client *http.Client, at string) (SimStats, error) {
	s := SimStats{URL: at}
	u, err := url.Parse(at)
	if err != nil {
		return s, err
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/sim/stats"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return s, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return s, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return s, fmt.Errorf("status %d", resp.StatusCode)
	}
	var body struct {
		Lateness *struct{ P50, P99, Max float64 } `json:"step_lateness_ms"`
		Computed uint64                           `json:"prefill_tokens_computed"`
		Cached   uint64                           `json:"prefill_tokens_cached"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 8<<20)).Decode(&body); err != nil {
		return s, err
	}
	if body.Lateness == nil {
		return s, errors.New("no step_lateness_ms in the answer")
	}
	s.Computed, s.Cached = body.Computed, body.Cached
	s.StepP50MS, s.StepP99MS, s.StepMaxMS = &body.Lateness.P50, &body.Lateness.P99, &body.Lateness.Max
	return s, nil
}
