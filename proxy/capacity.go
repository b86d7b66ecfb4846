package proxy

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
	"spillway/router"
	"spillway/worker"
)

// lane is what kind of traffic a request belongs to.
type lane uint8

const (
	interactive lane = iota
	batch            // sent by a dispatcher
	numLanes
)

var laneNames = [numLanes]string{interactive: "interactive", batch: "batch"}

// laneOf is the lane of a request by its head.
func laneOf(h http.Header) lane {
	if batched(h) {
		return batch
	}
	return interactive
}

// What a worker can take where it is not configured: the defaults of llm-d's concurrency detector.
const (
	defaultConcurrency      = 100
	defaultTokenConcurrency = 1_000_000
)

// Requests is a number of requests.
type Requests struct {
	Requests uint64 `json:"requests"`
}

// Capacity is how full a pool of workers is, and how large. The pool is a model by its canonical
// name, all tenants together.
type Capacity struct {
	Pool string `json:"pool"`
	// Fullness is the largest of Saturation and the filled parts of the queue for workers and of
	// the memory for bodies. At 1 and above a request would be shed.
	Fullness float64 `json:"fullness"`
	// Saturation is the mean load of the routable workers, each at most 1 while any of them is
	// free. A worker's load is that of its least loaded rank: the largest value over its threshold,
	// or requests in flight over max_concurrency where no threshold is set. 1 without workers.
	Saturation     float64 `json:"saturation"`
	ReadyEndpoints int     `json:"ready_endpoints"` // routable workers
	Capacity       struct {
		Requests uint64 `json:"requests"` // sum of max_concurrency
		Tokens   uint64 `json:"tokens"`
		Bytes    uint64 `json:"bytes"` // 0: unknown
	} `json:"capacity"`
	Inflight struct {
		Interactive Requests `json:"interactive"`
		Batch       Requests `json:"batch"`
	} `json:"inflight"`
	Seq          uint64 `json:"seq"` // of the pool's measurements in this process
	SampleTimeMS int64  `json:"sample_time_ms"`
}

// Time is when it was measured.
func (c Capacity) Time() time.Time { return time.UnixMilli(c.SampleTimeMS) }

// measureEvery is how often a pool is measured at most, however many ask.
const measureEvery = 100 * time.Millisecond

// gauge keeps the last measurement of one pool.
type gauge struct {
	mu   sync.Mutex // guards last; held while measuring, so that those who ask together share one
	last Capacity
	at   time.Time
}

// Capacity measures a pool, by any name of the model, at most once in 100 ms. With after it waits
// for a measurement of a later number. It fails with an *httperr.Error of 404 for an unknown pool.
func (s *Server) Capacity(ctx context.Context, pool string, after uint64) (Capacity, error) {
	name, known := s.router.Catalog().Canonical(pool)
	if !known {
		return Capacity{}, httperr.New(http.StatusNotFound, "The pool is unknown")
	}
	g := &s.models.of(name).gauge
	for {
		c, wait := g.read(after, time.Now(), func(now time.Time) Capacity { return s.measure(name, now) })
		if wait == 0 {
			return c, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return Capacity{}, ctx.Err()
		}
	}
}

// read returns the measurement that is due, or how long to wait until there is one after the given
// number.
func (g *gauge) read(after uint64, now time.Time, measure func(time.Time) Capacity) (Capacity, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if left := measureEvery - now.Sub(g.at); left <= 0 || g.last.Seq == 0 {
		seq := max(g.last.Seq, after) + 1 // after may be of the process before this one
		g.last, g.at = measure(now), now
		g.last.Seq = seq
	} else if g.last.Seq <= after {
		return Capacity{}, left
	}
	return g.last, 0
}

// measure looks at all workers of a model.
func (s *Server) measure(model string, now time.Time) Capacity {
	c := Capacity{Pool: model, SampleTimeMS: now.UnixMilli()}
	catalog := s.router.Catalog()
	var loads []float64
	free := false
	s.router.Partitions(model, func(p *router.Partition) {
		snap := p.Busy.Snapshot()
		free = free || len(snap.Free) > 0
		for _, id := range snap.Routable {
			w := catalog.Find(id)
			if w == nil { // gone since
				continue
			}
			limit := concurrencyOf(w)
			c.ReadyEndpoints++
			c.Capacity.Requests += limit
			c.Capacity.Tokens += defaultTokenConcurrency
			loads = append(loads, workerLoad(p, id, limit, now))
		}
	})
	c.Saturation = 1
	if c.ReadyEndpoints > 0 {
		c.Saturation = 0
		for _, l := range loads {
			if free {
				l = min(l, 1)
			}
			c.Saturation += l / float64(len(loads))
		}
	}
	c.Fullness = max(c.Saturation, float64(s.bodies.held.Load())/float64(s.bodies.limit))
	waiting, _ := s.waiting(model)
	if limit := s.router.QueueSize(); limit > 0 {
		c.Fullness = max(c.Fullness, float64(waiting)/float64(limit))
	}
	lanes := &s.models.of(model).metrics.lanes
	c.Inflight.Interactive.Requests = uint64(max(0, lanes[interactive].Load()))
	c.Inflight.Batch.Requests = uint64(max(0, lanes[batch].Load()))
	return c
}

// waiting counts the requests that wait for a worker of a model, and the bytes of their bodies.
// None of them is of a batch.
func (s *Server) waiting(model string) (requests int, bytes int64) {
	s.router.Partitions(model, func(p *router.Partition) { requests += p.Waiting() })
	return requests, max(0, s.models.of(model).metrics.waitingBytes.Load())
}

func concurrencyOf(w *worker.Worker) uint64 {
	if w.MaxConcurrency > 0 {
		return uint64(w.MaxConcurrency)
	}
	return defaultConcurrency
}

// workerLoad is the load of a worker whose max_concurrency is limit.
func workerLoad(p *router.Partition, id worker.ID, limit uint64, now time.Time) float64 {
	pressure, checked := p.Busy.LeastLoaded(&id, now)
	if !checked {
		var requests uint64
		for _, r := range p.Tracker.Ranks(id, now, nil) {
			requests += r.Requests
		}
		return float64(requests) / float64(limit)
	}
	if math.IsInf(pressure.Load, 1) { // above a threshold of 0
		return 1
	}
	return pressure.Load
}

// showCapacity serves GET /internal/capacity?pool=P&after=SEQ.
func (s *Server) showCapacity(c echo.Context) error {
	var after uint64
	if v := c.QueryParam("after"); v != "" {
		var err error
		if after, err = strconv.ParseUint(v, 10, 64); err != nil || after == math.MaxUint64 {
			return httperr.New(http.StatusBadRequest, "after is not a number")
		}
	}
	measured, err := s.Capacity(c.Request().Context(), c.QueryParam("pool"), after)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, measured)
}

// collectPool tells how full the pool of a model is.
func (m *metrics) collectPool(p page, mm *modelMetrics, now time.Time) {
	f, s := m.families, m.server
	c := s.measure(mm.name, now)
	pool := labeled("pool", mm.name)
	p.put(f.poolFullness, pool, c.Fullness)
	p.put(f.poolSaturation, pool, c.Saturation)
	p.put(f.poolReady, pool, float64(c.ReadyEndpoints))
	p.count(f.poolCapacity, labeled("pool", mm.name, "unit", "requests"), c.Capacity.Requests)
	p.count(f.poolCapacity, labeled("pool", mm.name, "unit", "tokens"), c.Capacity.Tokens)
	waiting, bytes := s.waiting(mm.name)
	for i, inflight := range []uint64{c.Inflight.Interactive.Requests, c.Inflight.Batch.Requests} {
		p.count(f.poolInflight, labeled("pool", mm.name, "unit", "requests", "lane", laneNames[i]), inflight)
		l := labeled("pool", mm.name, "lane", laneNames[i])
		p.put(f.poolQueue, l, float64(waiting))
		p.put(f.poolQueueBytes, l, float64(bytes))
		waiting, bytes = 0, 0 // batches do not wait here
		for j, reason := range httperr.Reasons {
			for k, code := range s.shedCodes {
				if n := mm.sheds[i][j][k].Load(); n > 0 || k == 0 {
					p.count(f.shed, labeled("pool", mm.name, "lane", laneNames[i], "code", strconv.Itoa(code), "reason", string(reason)), n)
				}
			}
		}
	}
	if s.cfg.CompatMetrics {
		m.collectCompat(p, mm, c, now)
	}
}

// shedBy counts a refusal by its lane and status; others than the known ones count with the first.
func (mm *modelMetrics) shedBy(l lane, reason int, status int, codes []int) {
	for k, code := range codes {
		if code == status {
			mm.sheds[l][reason][k].Add(1)
			return
		}
	}
	mm.sheds[l][reason][0].Add(1)
}

// shedCodes are the statuses of refusals.
const shedCodes = 4

// laneMetrics are the numbers of a model that are counted by lane.
type laneMetrics struct {
	lanes        [numLanes]atomic.Int64               // inference requests from when their model is known to their end
	waitingBytes atomic.Int64                         // of bodies of requests that wait for a worker
	sheds        [numLanes][][shedCodes]atomic.Uint64 // by index in httperr.Reasons, and in Server.shedCodes
}

// collectCompat tells the same in the words of llm-d's endpoint picker, for its async processor.
func (m *metrics) collectCompat(p page, mm *modelMetrics, c Capacity, now time.Time) {
	f, s := m.families, m.server
	name := labeled("name", mm.name)
	p.put(f.compatReadyPods, name, float64(c.ReadyEndpoints))
	p.put(f.compatReady, name, float64(c.ReadyEndpoints))
	p.put(f.compatSaturation, labeled("inference_pool", mm.name), c.Saturation)
	p.put(f.compatSaturationStage, labeled("inference_pool", mm.name, "stage", "effective"), c.Saturation)
	queue := c.Fullness * float64(c.Capacity.Requests)
	if s.cfg.CompatQueueSize == compatQueue {
		waiting, _ := s.waiting(mm.name)
		queue = float64(waiting)
	}
	p.put(f.compatQueueSize, labeled("fairness_id", "default", "priority", "0", "inference_pool", mm.name, "model_name", mm.name, "target_model_name", mm.name), queue)
	var waiting, running, usage float64
	s.router.Partitions(mm.name, func(part *router.Partition) {
		for _, st := range part.Busy.Workers(now) {
			if !st.Routable {
				continue
			}
			var w, r, used float64
			for i := range st.Ranks {
				rank := &st.Ranks[i]
				if rank.Waiting != nil {
					w += float64(*rank.Waiting)
				}
				if rank.Running != nil {
					r += float64(*rank.Running)
				}
				used += rank.Report.ReportedRatio() / float64(len(st.Ranks))
			}
			p.put(f.compatPodQueue, labeled("name", mm.name, "model_server_pod", st.Name), w)
			waiting, running, usage = waiting+w, running+r, usage+used
		}
	})
	n := float64(max(1, c.ReadyEndpoints))
	p.put(f.compatMeanQueue, name, waiting/n)
	p.put(f.compatMeanRunning, name, running/n)
	p.put(f.compatMeanUsage, name, usage/n)
}

// namePools names the series about pools, and if they are asked for those that llm-d has for them.
func (f *families) namePools(compat bool) {
	f.poolFullness = f.gauge("spillway_pool_fullness", "How full a model's workers, queue and body memory are, by the fullest; at 1 and above a request would be shed.", "pool")
	f.poolSaturation = f.gauge("spillway_pool_saturation", "Mean load of a model's routable workers.", "pool")
	f.poolReady = f.gauge("spillway_pool_ready_endpoints", "Routable workers.", "pool")
	f.poolCapacity = f.gauge("spillway_pool_capacity", "What the routable workers can take at once.", "pool", "unit")
	f.poolInflight = f.gauge("spillway_pool_inflight", "Requests from when their model is known to the end of their answer.", "pool", "unit", "lane")
	f.poolQueue = f.gauge("spillway_pool_queue_size", "Requests that wait for a worker.", "pool", "lane")
	f.poolQueueBytes = f.gauge("spillway_pool_queue_bytes", "Bytes of their bodies.", "pool", "lane")
	f.shed = f.counter("spillway_requests_shed_total", "Refused requests by lane, status and reason.", "pool", "lane", "code", "reason")
	if !compat {
		return
	}
	f.compatReadyPods = f.gauge("inference_pool_ready_pods", "The same as spillway_pool_ready_endpoints.", "name")
	f.compatReady = f.gauge("llm_d_epp_ready_endpoints", "The same as spillway_pool_ready_endpoints.", "name")
	f.compatPodQueue = f.gauge("inference_pool_per_pod_queue_size", "Requests that wait in the engine of a routable worker.", "name", "model_server_pod")
	f.compatMeanQueue = f.gauge("inference_pool_average_queue_size", "Their mean over the routable workers.", "name")
	f.compatMeanRunning = f.gauge("inference_pool_average_running_requests", "Requests that run in an engine, mean over the routable workers.", "name")
	f.compatMeanUsage = f.gauge("inference_pool_average_kv_cache_utilization", "Used part of the KV cache, mean over the routable workers.", "name")
	f.compatQueueSize = f.gauge("inference_extension_flow_control_queue_size", "Not a queue: spillway_pool_fullness x capacity in requests, so that 1 - this / (ready pods x max concurrency) is what is free; with --compat-queue-size queue the requests that wait for a worker.",
		"fairness_id", "priority", "inference_pool", "model_name", "target_model_name")
	f.compatSaturation = f.gauge("inference_extension_flow_control_pool_saturation", "The same as spillway_pool_saturation.", "inference_pool")
	f.compatSaturationStage = f.gauge("llm_d_epp_flow_control_pool_saturation", "The same as spillway_pool_saturation.", "inference_pool", "stage")
}

// The values of compat-queue-size.
const (
	compatFullness = "fullness"
	compatQueue    = "queue"
)
