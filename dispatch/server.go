package dispatch

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
)

// maxBody bounds the bodies of requests to us.
const maxBody = 64 << 20

// Doors are where a dispatcher can be reached.
type Doors struct{ API, Health, Metrics net.Listener }

// Serve answers at the doors until ctx ends.
func (d *Dispatcher) Serve(ctx context.Context, doors Doors, reg *prometheus.Registry) error {
	health, pages := http.NewServeMux(), http.NewServeMux()
	health.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { send(w, 200, map[string]string{"status": "ok"}) })
	health.HandleFunc("GET /readyz", d.readyz)
	pages.Handle("GET /metrics", d.forScrapers(promhttp.HandlerFor(reg, promhttp.HandlerOpts{})))
	served := make(chan error, 3)
	var servers []*http.Server
	for _, s := range []struct {
		ln net.Listener
		h  http.Handler
	}{{doors.API, d.Handler()}, {doors.Health, health}, {doors.Metrics, pages}} {
		srv := &http.Server{Handler: s.h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10}
		servers = append(servers, srv)
		go func() { served <- srv.Serve(s.ln) }()
	}
	var err error
	left := len(servers)
	select {
	case err = <-served:
		left--
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	for _, srv := range servers {
		if srv.Shutdown(last) != nil {
			_ = srv.Close()
		}
	}
	for ; left > 0; left-- {
		<-served
	}
	return err
}

func send(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(marshal(v), '\n')) // a client that has left hears nothing
}

func refuseRequest(w http.ResponseWriter, status int, err error) {
	send(w, status, map[string]string{"error": err.Error()})
}

func (d *Dispatcher) readyz(w http.ResponseWriter, r *http.Request) {
	if !d.ready.Load() {
		send(w, 503, map[string]string{"status": "not ready"})
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
	defer cancel()
	if err := d.store.redis.Ping(ctx).Err(); err != nil {
		send(w, 503, map[string]string{"status": "not ready", "error": err.Error()})
		return
	}
	send(w, 200, map[string]string{"status": "ready"})
}

// Handler serves what people and other programs ask of the dispatcher, below /internal/dispatch/. It
// asks for the API key, if there is one.
func (d *Dispatcher) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /internal/dispatch/status", d.showStatus)
	mux.HandleFunc("GET /internal/dispatch/dead", d.listDead)
	mux.HandleFunc("POST /internal/dispatch/dead/requeue", d.requeueDead)
	mux.HandleFunc("POST /internal/dispatch/dead/purge", d.purgeDead)
	mux.HandleFunc("POST /internal/dispatch/submit", d.takeSubmission)
	mux.HandleFunc("POST /internal/dispatch/cancel", d.takeCancel)
	mux.HandleFunc("POST /internal/dispatch/results", d.popResults)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if d.cfg.APIKey != "" && !bears(r, d.cfg.APIKey) {
			refuseRequest(w, 401, errors.New("the API key is missing or wrong"))
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		mux.ServeHTTP(w, r)
	})
}

// bears tells whether a request has a bearer token.
func bears(r *http.Request, token string) bool {
	want, got := sha256.Sum256([]byte("Bearer "+token)), sha256.Sum256([]byte(r.Header.Get("Authorization")))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

// forScrapers asks for the token of the metrics, if there is one. Its file is read each time, and while it
// cannot be, or is empty, nobody gets in.
func (d *Dispatcher) forScrapers(h http.Handler) http.Handler {
	if d.cfg.MetricsKey == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := os.ReadFile(d.cfg.MetricsKey)
		token := strings.TrimSpace(string(text))
		if err != nil || token == "" || !bears(r, token) {
			refuseRequest(w, 401, errors.New("the token is missing or wrong"))
			return
		}
		h.ServeHTTP(w, r)
	})
}

// GroupStatus tells why a budget is as it is.
type GroupStatus struct {
	InferencePool   string   `json:"inference_pool"`
	State           string   `json:"state"`
	D               *float64 `json:"D"`
	B               float64  `json:"B"`
	MaxSys          *float64 `json:"max_sys"`
	Unit            string   `json:"unit"`
	N               float64  `json:"N"`
	Ledger          int64    `json:"ledger"`
	InFlight        int      `json:"in_flight"`
	Allowed         int64    `json:"allowed"`
	SampleAgeMS     *int64   `json:"sample_age_ms"`
	Source          string   `json:"source"`
	OverloadSinceMS *int64   `json:"overload_since_ms"` // Unix milliseconds
	Strikes         int      `json:"strikes"`
}

// QueueStatus is what one queue holds.
type QueueStatus struct {
	Queue        string   `json:"queue"`
	Pending      int64    `json:"pending"`
	Leased       int64    `json:"leased"`
	Delayed      int64    `json:"delayed"`
	Dead         int64    `json:"dead"`
	OldestAge    *float64 `json:"oldest_age_s"`    // of the head, the message with the earliest deadline
	NextDeadline *float64 `json:"next_deadline_s"` // seconds until it
}

// Status is the answer of /internal/dispatch/status.
type Status struct {
	Groups []GroupStatus `json:"groups"`
	Queues []QueueStatus `json:"queues"`
}

func known(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// Status looks at the budgets and, in Redis, at the queues.
func (d *Dispatcher) Status(ctx context.Context) (s Status, err error) {
	now := time.Now()
	for _, g := range d.groups {
		dec := g.decide(now)
		gs := GroupStatus{
			InferencePool: g.label, State: dec.State.String(), D: known(dec.D), B: dec.B, MaxSys: known(dec.MaxSys), Unit: g.budget.Unit().String(),
			N: dec.N, Ledger: dec.Ledger, InFlight: dec.InFlight, Allowed: dec.Allowed, Source: g.inputs[dec.Source].name, Strikes: dec.Strikes,
		}
		if !dec.Sampled.IsZero() {
			gs.SampleAgeMS = new(now.Sub(dec.Sampled).Milliseconds())
		}
		if !dec.Since.IsZero() {
			gs.OverloadSinceMS = new(dec.Since.UnixMilli())
		}
		s.Groups = append(s.Groups, gs)
	}
	for _, q := range d.queues {
		found, err := d.store.depth(ctx, q)
		if err != nil {
			return s, err
		}
		qs := QueueStatus{Queue: q.Name, Pending: found.pending, Leased: found.leased, Delayed: found.delayed, Dead: found.dead}
		if found.head != nil {
			qs.OldestAge = new(found.age(now))
			qs.NextDeadline = new(found.head.deadline.Sub(now).Seconds())
		}
		s.Queues = append(s.Queues, qs)
	}
	return s, nil
}

func (d *Dispatcher) showStatus(w http.ResponseWriter, r *http.Request) {
	s, err := d.Status(r.Context())
	if err != nil {
		refuseRequest(w, 503, err)
		return
	}
	send(w, 200, s)
}

// queueNamed finds a queue by ID or name; "" is the first.
func (d *Dispatcher) queueNamed(name string) (*Queue, error) {
	for _, q := range d.queues {
		if name == "" || q.ID == name || q.Name == name {
			return q, nil
		}
	}
	return nil, fmt.Errorf("there is no queue %q", name)
}

// deadRequest is what is asked of dead letters: of one by its entry, or of all.
type deadRequest struct {
	Queue    string `json:"queue"`
	Entry    string `json:"entry"`
	Deadline int64  `json:"deadline"` // Unix seconds
}

const deadAtOnce = 1000

func (d *Dispatcher) listDead(w http.ResponseWriter, r *http.Request) {
	q, err := d.queueNamed(r.URL.Query().Get("queue"))
	if err != nil {
		refuseRequest(w, 404, err)
		return
	}
	after := "-"
	if a := r.URL.Query().Get("after"); a != "" {
		after = "(" + a
	}
	entries, err := d.store.redis.XRangeN(r.Context(), q.keys.dead, after, "+", 100).Result()
	if err != nil {
		refuseRequest(w, 503, err)
		return
	}
	count, err := d.store.redis.XLen(r.Context(), q.keys.dead).Result()
	if err != nil {
		refuseRequest(w, 503, err)
		return
	}
	all := []map[string]any{}
	for _, e := range entries {
		e.Values["entry"] = e.ID
		all = append(all, e.Values)
	}
	send(w, 200, map[string]any{"queue": q.Name, "count": count, "letters": all})
}

func (d *Dispatcher) deadOf(w http.ResponseWriter, r *http.Request) (q *Queue, req deadRequest, letters []redis.XMessage, ok bool) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = strict(body, &req)
	}
	if err != nil {
		refuseRequest(w, 400, err)
		return nil, req, nil, false
	}
	if q, err = d.queueNamed(req.Queue); err != nil {
		refuseRequest(w, 404, err)
		return nil, req, nil, false
	}
	from, to := "-", "+"
	if req.Entry != "" {
		from, to = req.Entry, req.Entry
	}
	if letters, err = d.store.redis.XRangeN(r.Context(), q.keys.dead, from, to, deadAtOnce).Result(); err != nil {
		refuseRequest(w, 503, err)
		return nil, req, nil, false
	}
	return q, req, letters, true
}

// requeueScript moves a dead letter back into its queue. ARGV: entry, score, member.
var requeueScript = script(`
if call('XDEL', dead, ARGV[1]) == 0 then return 0 end
call('ZADD', queue, ARGV[2], ARGV[3])
return 1`)

func (d *Dispatcher) requeueDead(w http.ResponseWriter, r *http.Request) {
	q, req, letters, ok := d.deadOf(w, r)
	if !ok {
		return
	}
	if req.Deadline <= time.Now().Unix() {
		refuseRequest(w, 400, errors.New("deadline: must be in the future, in Unix seconds"))
		return
	}
	moved, unfit := 0, 0
	for _, e := range letters {
		raw, _ := e.Values["raw"].(string)
		fresh, err := revived(raw, req.Deadline)
		if err != nil {
			unfit++
			continue
		}
		n, err := requeueScript.Run(r.Context(), d.store.redis, q.keys.list(), e.ID, req.Deadline, fresh).Int()
		if err != nil {
			refuseRequest(w, 503, err)
			return
		}
		moved += n
	}
	d.nudge()
	send(w, 200, map[string]int{"requeued": moved, "unfit": unfit})
}

// revived is a member as if it were new: a new generation with another deadline.
func revived(raw string, deadline int64) ([]byte, error) {
	if _, err := parse(raw, 0); err != nil {
		return nil, err
	}
	top, err := members([]byte(raw))
	if err != nil {
		return nil, err
	}
	data, err := members(top[find(top, "data")].value)
	if err != nil {
		return nil, err
	}
	top = set(top, "data", encode(set(data, "deadline", strconv.AppendInt(nil, deadline, 10))))
	var internal []member
	if at := find(top, "internal"); at >= 0 && string(top[at].value) != "null" {
		if internal, err = members(top[at].value); err != nil {
			return nil, err
		}
	}
	internal = set(set(internal, "retry_count", []byte("0")), "spillway", []byte("{}"))
	return encode(set(top, "internal", encode(set(internal, "request_token", quoted(newToken()))))), nil
}

func (d *Dispatcher) purgeDead(w http.ResponseWriter, r *http.Request) {
	q, _, letters, ok := d.deadOf(w, r)
	if !ok {
		return
	}
	purged := int64(0)
	for _, e := range letters {
		n, err := d.store.redis.XDel(r.Context(), q.keys.dead, e.ID).Result()
		if err != nil {
			refuseRequest(w, 503, err)
			return
		}
		purged += n
	}
	send(w, 200, map[string]int64{"purged": purged})
}

// takeSubmission serves POST submit?queue=Q: one request per line.
func (d *Dispatcher) takeSubmission(w http.ResponseWriter, r *http.Request) {
	q, err := d.queueNamed(r.URL.Query().Get("queue"))
	if err != nil {
		refuseRequest(w, 404, err)
		return
	}
	dec := json.NewDecoder(r.Body)
	taken, twice := 0, []string{}
	for {
		var s Submission
		if err := dec.Decode(&s); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			send(w, 400, map[string]any{"error": fmt.Sprintf("request %d: %v", taken+1, err), "accepted": taken})
			return
		}
		if s.ResultQueue == "" {
			s.ResultQueue = d.transport.ResultQueue
			if q.ResultQueue != "" {
				s.ResultQueue = q.ResultQueue
			}
		}
		s.Once = d.transport.Dedupe == "active"
		err := Enqueue(r.Context(), d.store.redis, q.Name, s, time.Now())
		if errors.Is(err, ErrActive) {
			twice = append(twice, s.ID)
			continue
		}
		if err != nil {
			status := 503
			if errors.Is(err, ErrSubmission) {
				status = 400
			}
			send(w, status, map[string]any{"error": fmt.Sprintf("request %d: %v", taken+1, err), "accepted": taken})
			return
		}
		taken++
	}
	d.nudge()
	send(w, 200, map[string]any{"accepted": taken, "active": twice})
}

func (d *Dispatcher) takeCancel(w http.ResponseWriter, r *http.Request) {
	var req struct {
		IDs []string `json:"ids"`
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = strict(body, &req)
	}
	if err != nil {
		refuseRequest(w, 400, err)
		return
	}
	marked := 0
	for _, id := range req.IDs {
		ok, err := Cancel(r.Context(), d.store.redis, id)
		if err != nil {
			refuseRequest(w, 503, err)
			return
		}
		if ok {
			marked++
		}
	}
	send(w, 200, map[string]int{"cancelling": marked})
}

// popResults serves POST results: it takes results off a list.
func (d *Dispatcher) popResults(w http.ResponseWriter, r *http.Request) {
	req := struct {
		List   string `json:"list"`
		Max    int    `json:"max"`
		WaitMS int    `json:"wait_ms"`
	}{List: d.transport.ResultQueue, Max: 100}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = strict(body, &req)
	}
	if err == nil && (req.Max < 1 || req.Max > 1000 || req.WaitMS < 0 || req.WaitMS > 30000) {
		err = errors.New("max must be within 1..1000, wait_ms within 0..30000")
	}
	if err != nil {
		refuseRequest(w, 400, err)
		return
	}
	all := []json.RawMessage{}
	until := time.Now().Add(time.Duration(req.WaitMS) * time.Millisecond)
	for {
		got, err := d.store.redis.RPopCount(r.Context(), req.List, req.Max).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			refuseRequest(w, 503, err)
			return
		}
		for _, text := range got {
			all = append(all, json.RawMessage(text))
		}
		if len(all) > 0 || !time.Now().Before(until) || r.Context().Err() != nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	send(w, 200, map[string]any{"results": all})
}
