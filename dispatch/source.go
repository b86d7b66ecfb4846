package dispatch

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/redis/go-redis/v9"

	"spillway/dispatch/budget"
)

// reader asks one place how much is free. What fails is an error; then nothing is free.
type reader interface {
	read(ctx context.Context) (budget.Reading, error)
}

const (
	queryTimeout = 3 * time.Second
	maxPage      = 32 << 20 // bytes of a metrics page or an answer
)

// asker is an HTTP client with the credentials of an operator.
type asker struct {
	client  *http.Client
	auth    HTTPAuth
	timeout time.Duration
	log     *slog.Logger
}

func newAsker(auth HTTPAuth, timeout time.Duration, log *slog.Logger) (*asker, error) {
	conf, err := tlsConfig(auth.CA, auth.Cert, auth.Key, auth.Insecure, false)
	if err != nil {
		return nil, err
	}
	conf.ServerName = auth.ServerName
	return &asker{&http.Client{Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: conf, MaxIdleConnsPerHost: 4, IdleConnTimeout: 90 * time.Second,
	}}, auth, timeout, log}, nil
}

// tlsConfig reads certificates; with system the authorities are added to those of the system.
func tlsConfig(ca, cert, key string, insecure, system bool) (*tls.Config, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: insecure}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		conf.RootCAs = x509.NewCertPool()
		if all, err := x509.SystemCertPool(); system && err == nil {
			conf.RootCAs = all
		}
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", ca)
		}
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, err
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	return conf, nil
}

// do sends a request and reads its answer, which must be of status 2xx.
func (a *asker) do(req *http.Request) ([]byte, int, error) {
	if f := a.auth.BearerTokenFile; f != "" {
		token, err := os.ReadFile(f)
		if err != nil {
			return nil, 0, err
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	if a.auth.BasicUser != "" {
		password, err := os.ReadFile(a.auth.BasicFile)
		if err != nil {
			return nil, 0, err
		}
		req.SetBasicAuth(a.auth.BasicUser, strings.TrimSpace(string(password)))
	}
	for _, h := range a.auth.Headers {
		name, value, _ := strings.Cut(h, "=")
		req.Header.Set(name, value)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage+1))
	switch {
	case err != nil:
		return nil, resp.StatusCode, err
	case len(body) > maxPage:
		return nil, resp.StatusCode, errors.New("the answer is too long")
	case resp.StatusCode/100 != 2:
		return nil, resp.StatusCode, fmt.Errorf("status %d", resp.StatusCode)
	}
	return body, resp.StatusCode, nil
}

// capacityReader asks a Spillway front end.
type capacityReader struct {
	*asker
	url  string // of /internal/capacity
	size sizing
}

func (c *capacityReader) read(ctx context.Context) (budget.Reading, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url, nil)
	if err != nil {
		return budget.Reading{}, err
	}
	body, _, err := c.do(req)
	if err != nil {
		return budget.Reading{}, err
	}
	var v struct {
		Fullness *float64 `json:"fullness"`
		Ready    *int     `json:"ready_endpoints"`
		Capacity struct{ Requests, Tokens uint64 }
		Time     int64 `json:"sample_time_ms"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return budget.Reading{}, err
	}
	if v.Fullness == nil || v.Ready == nil || v.Time == 0 {
		return budget.Reading{}, errors.New("fullness, ready_endpoints or sample_time_ms is missing")
	}
	return c.size.reading(Capacity{*v.Fullness, *v.Ready, v.Capacity.Requests, v.Capacity.Tokens, time.UnixMilli(v.Time)}), nil
}

// insideReader asks the front end of this process.
type insideReader struct {
	capacity func(context.Context, string) (Capacity, error)
	pool     string
	size     sizing
}

func (i insideReader) read(ctx context.Context) (budget.Reading, error) {
	c, err := i.capacity(ctx, i.pool)
	if err != nil {
		return budget.Reading{}, err
	}
	return i.size.reading(c), nil
}

// sizing is how max_SYS is made of what a front end tells.
type sizing struct {
	unit   budget.Unit
	per    float64 // of an endpoint, in units that the front end does not tell
	maxSys float64 // fixed capacity, or NaN
}

func (s sizing) reading(c Capacity) budget.Reading {
	r := budget.Reading{D: 1 - c.Fullness, Time: c.Time}
	told := map[budget.Unit]uint64{budget.Requests: c.Requests, budget.Tokens: c.Tokens}[s.unit]
	switch {
	case c.ReadyEndpoints <= 0:
	case !math.IsNaN(s.maxSys):
		r.MaxSys = s.maxSys
	case told == 0:
		r.MaxSys = float64(c.ReadyEndpoints) * s.per
	default:
		r.MaxSys = float64(told)
	}
	return r
}

// scrapeReader reads a metrics page.
type scrapeReader struct {
	*asker
	url, metric string
	labels      map[string]string
	aggregate   string // max, sum or avg
	isBudget    bool   // the value is D itself, no saturation
	perPod      float64
	podsURL     string // with podsMetric: perPod is that of one
	podsMetric  string
	podsLabels  map[string]string
	maxSys      float64
	perEndpoint float64
}

func (s *scrapeReader) read(ctx context.Context) (budget.Reading, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	v, at, err := s.value(ctx, s.url, s.metric, s.labels, s.aggregate)
	if err != nil {
		return budget.Reading{}, err
	}
	pods, most := 1.0, s.perPod
	if s.podsURL != "" && s.podsMetric != "" {
		if pods, _, err = s.value(ctx, s.podsURL, s.podsMetric, s.podsLabels, "max"); err != nil {
			return budget.Reading{}, err
		}
		if pods <= 0 {
			return budget.Reading{MaxSys: 0, Time: at}, nil
		}
		most *= pods
	}
	r := budget.Reading{D: 1 - v, MaxSys: s.maxSys, Time: at}
	switch {
	case s.isBudget:
		r.D = v
	case s.perPod > 0:
		r.D = 1 - min(max(v/most, 0), 1)
	}
	if math.IsNaN(r.MaxSys) && s.podsURL != "" {
		r.MaxSys = pods * s.perEndpoint
	}
	return r, nil
}

// value aggregates the matching samples of a page; histograms and summaries are passed over.
func (s *scrapeReader) value(ctx context.Context, from, metric string, labels map[string]string, aggregate string) (float64, time.Time, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return 0, time.Time{}, err
	}
	body, _, err := s.do(req)
	if err != nil {
		return 0, time.Time{}, err
	}
	at := time.Now()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(strings.TrimSuffix(string(body), "# EOF\n")))
	if err != nil {
		return 0, at, err
	}
	n, sum, most := 0.0, 0.0, math.Inf(-1)
	for _, m := range families[metric].GetMetric() {
		match := 0
		for _, l := range m.Label {
			if v, ok := labels[l.GetName()]; ok && v == l.GetValue() {
				match++
			}
		}
		if match != len(labels) || m.Gauge == nil && m.Counter == nil && m.Untyped == nil {
			continue
		}
		v := m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetUntyped().GetValue()
		n, sum, most = n+1, sum+v, max(most, v)
		if m.TimestampMs != nil && time.UnixMilli(m.GetTimestampMs()).Before(at) {
			at = time.UnixMilli(m.GetTimestampMs())
		}
	}
	v := most
	switch aggregate {
	case "sum":
		v = sum
	case "avg":
		v = sum / n
	}
	if n == 0 {
		return 0, at, errNoSample
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, at, fmt.Errorf("the value %v", v)
	}
	return v, at, nil
}

// redisReader reads a budget that somebody else puts into Redis.
type redisReader struct {
	redis       redis.UniversalClient
	key         string
	missingOpen bool
	maxSys      float64
}

func (r *redisReader) read(ctx context.Context) (budget.Reading, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	text, err := r.redis.Get(ctx, r.key).Result()
	missing := errors.Is(err, redis.Nil)
	if err != nil && !missing {
		return budget.Reading{}, err
	}
	v, bad := strconv.ParseFloat(text, 64)
	if missing || bad != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		if !r.missingOpen {
			return budget.Reading{}, fmt.Errorf("%s holds no number", r.key)
		}
		v = 1
	}
	return budget.Reading{D: v, MaxSys: r.maxSys}, nil
}

// constantReader says that all is free.
type constantReader struct{ maxSys float64 }

func (c constantReader) read(context.Context) (budget.Reading, error) {
	return budget.Reading{D: 1, MaxSys: c.maxSys}, nil
}
