package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"spillway/dispatch/budget"
)

// promAPI asks a Prometheus.
type promAPI struct {
	*asker
	url    string // without a slash at its end
	warned string // of its warnings, the last that were logged; of the poller's goroutine
}

// errNoSample tells that a query has found nothing.
var errNoSample = errors.New("no series")

// query is the value of an expression that has exactly one.
func (p *promAPI) query(ctx context.Context, expr string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	form := url.Values{"query": {expr}}.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/api/v1/query", strings.NewReader(form))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	body, status, err := p.do(req)
	if status == 403 || status == 405 || status == 501 {
		if req, err = http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/api/v1/query?"+form, nil); err != nil {
			return 0, err
		}
		body, _, err = p.do(req)
	}
	if err != nil {
		return 0, err
	}
	var said struct{ Warnings []string }
	if json.Unmarshal(body, &said) == nil && len(said.Warnings) > 0 {
		if text := strings.Join(said.Warnings, "; "); text != p.warned {
			p.warned = text
			p.log.Warn("Prometheus warns about its answer", "query", expr, "warning", text)
		}
	}
	return promValue(body)
}

// promValue reads the one number of an answer.
func promValue(body []byte) (float64, error) {
	var answer struct {
		Status, Error string
		Data          struct {
			ResultType string
			Result     json.RawMessage
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, err
	}
	if answer.Status != "success" {
		return 0, fmt.Errorf("status %q: %s", answer.Status, answer.Error)
	}
	var value [2]any
	switch answer.Data.ResultType {
	case "scalar":
		if err := json.Unmarshal(answer.Data.Result, &value); err != nil {
			return 0, err
		}
	case "vector":
		var series []struct{ Value [2]any }
		if err := json.Unmarshal(answer.Data.Result, &series); err != nil {
			return 0, err
		}
		if len(series) == 0 {
			return 0, errNoSample
		}
		if len(series) > 1 {
			return 0, fmt.Errorf("%d series where one is expected", len(series))
		}
		value = series[0].Value
	default:
		return 0, fmt.Errorf("a result of type %q", answer.Data.ResultType)
	}
	text, _ := value[1].(string)
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, fmt.Errorf("the value %q", text)
	}
	return v, nil
}

// candidate is one way to learn D from Prometheus.
type candidate struct {
	d     string   // expression
	fresh []string // expressions of the times of its samples; none: unknown
}

// promReader tries candidates in their order. It begins with the first that answers and moves to
// better ones, but with failover alone to worse ones: those can take a full pool for an idle one.
type promReader struct {
	api        *promAPI
	candidates []candidate
	active     int // index of the one in use; len(candidates) before the first answer
	failover   bool
	ready      string // expression of ready endpoints; "" if capacity does not depend on them
	capacity   string // expression of capacity in requests that takes the place of ready x perEndpoint, or ""
	sized      bool   // capacity has been there
	per        float64
	maxSys     float64       // fixed capacity, or NaN
	maxAge     time.Duration // of samples; older ones are none
}

func (p *promReader) read(ctx context.Context) (budget.Reading, error) {
	last := p.active
	if p.failover || last == len(p.candidates) {
		last = len(p.candidates) - 1
	}
	var failed error
	for i := 0; i <= last; i++ {
		r, err := p.try(ctx, p.candidates[i])
		if err == nil {
			p.active = i
			return r, nil
		}
		failed = err
	}
	return budget.Reading{}, failed
}

func (p *promReader) try(ctx context.Context, c candidate) (r budget.Reading, err error) {
	if r.D, err = p.api.query(ctx, c.d); err != nil {
		return r, err
	}
	oldest := math.Inf(1)
	for _, f := range c.fresh {
		at, err := p.api.query(ctx, f)
		if err != nil {
			return r, err
		}
		oldest = min(oldest, at)
	}
	if len(c.fresh) > 0 {
		r.Time = time.UnixMilli(int64(oldest * 1000))
		if age := time.Since(r.Time); p.maxAge > 0 && age > p.maxAge {
			return r, fmt.Errorf("the sample is %v old", age.Round(time.Millisecond))
		}
	}
	r.MaxSys, err = p.size(ctx)
	return r, err
}

// size is max_SYS.
func (p *promReader) size(ctx context.Context) (float64, error) {
	ready := 1.0
	if p.ready != "" {
		var err error
		if ready, err = p.api.query(ctx, p.ready); err != nil && (!errors.Is(err, errNoSample) || math.IsNaN(p.maxSys)) {
			return 0, fmt.Errorf("ready endpoints: %w", err)
		} else if err != nil {
			ready = 1 // nobody counts them, and the size is given
		}
	}
	if ready <= 0 {
		return 0, nil
	}
	if !math.IsNaN(p.maxSys) {
		return p.maxSys, nil
	}
	if p.capacity != "" {
		v, err := p.api.query(ctx, p.capacity)
		if err == nil {
			p.sized = true
			return v, nil
		}
		if p.sized || !errors.Is(err, errNoSample) { // nobody would send more because a scrape has failed
			return 0, fmt.Errorf("capacity: %w", err)
		}
	}
	return ready * p.per, nil
}

// promSelector is a metric with labels, in PromQL.
func promSelector(metric string, labels ...string) string {
	var all []string
	for i := 0; i < len(labels); i += 2 {
		if labels[i+1] != "" {
			all = append(all, labels[i]+"="+strconv.Quote(labels[i+1]))
		}
	}
	slices.Sort(all)
	return metric + "{" + strings.Join(all, ",") + "}"
}

// ready is the expression of ready endpoints.
func ready(pool, namespace string) string {
	return "max(" + promSelector("spillway_pool_ready_endpoints", "pool", pool, "namespace", namespace) +
		" or " + promSelector("llm_d_epp_ready_endpoints", "name", pool, "namespace", namespace) +
		" or " + promSelector("inference_pool_ready_pods", "name", pool, "namespace", namespace) + ")"
}

func oldest(selectors ...string) string {
	for i, s := range selectors {
		selectors[i] = "timestamp(" + s + ")"
	}
	return "min(" + strings.Join(selectors, " or ") + ")"
}

// candidates are the queries for D, the best one first.
func candidates(pool, namespace string, per float64) []candidate {
	sel := func(metric, name string, more ...string) string {
		return promSelector(metric, append([]string{name, pool, "namespace", namespace}, more...)...)
	}
	fullness := sel("spillway_pool_fullness", "pool")
	epp, old := sel("llm_d_epp_flow_control_pool_saturation", "inference_pool", "stage", "effective"), sel("inference_extension_flow_control_pool_saturation", "inference_pool")
	old = strings.TrimSuffix(old, "}") + `,stage=~"(effective)?"}`
	running, pods := sel("vllm:num_requests_running", "inference_pool"), sel("inference_pool_ready_pods", "name")
	return []candidate{
		{"1 - max(" + fullness + ")", []string{oldest(fullness)}},
		{"1 - max(" + epp + " or " + old + ")", []string{oldest(epp, old)}},
		{fmt.Sprintf("1 - (sum(%s) / scalar(max(%s) * %g))", running, pods, per), []string{oldest(running), oldest(pods)}},
	}
}

// waiting are those that see waiting work only.
func waiting(pool, namespace string, per float64, original bool) []candidate {
	sel := func(metric, name string) string { return promSelector(metric, name, pool, "namespace", namespace) }
	queue, pods, each := sel("inference_extension_flow_control_queue_size", "inference_pool"), sel("inference_pool_ready_pods", "name"), sel("inference_pool_per_pod_queue_size", "name")
	first := fmt.Sprintf("1 - (sum(%s) / scalar(max(%s) * %g))", queue, pods, per)
	if original {
		first = fmt.Sprintf("1 - (sum by(inference_pool)(%s) / on() (%s * %g))", queue, pods, per)
	}
	return []candidate{
		{first, []string{oldest(queue), oldest(pods)}},
		{fmt.Sprintf("1 - (avg by(name)(%s) / %g)", each, per), []string{oldest(each)}},
	}
}
