package replay

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	builtAhead    = 32                               // request bodies kept ready
	lead          = 20*time.Millisecond + oracleLead // before the start of the run, to have them ready
	progressEvery = 5 * time.Second
)

// Run sends what cfg asks for, waits until all of it has ended, and writes the report to out: a
// table, or JSON if cfg.JSON is "-". If ctx ends, nothing more is sent, what is in flight is cut
// off, and the report of what there was is written and returned with a nil error. Run returns an
// error if cfg is not valid or the load, a process or a file cannot be read or written; when it
// returns, nothing that it started is left.
func Run(ctx context.Context, cfg Config, out io.Writer) (Report, error) {
	if err := cfg.Validate(); err != nil {
		return Report{}, err
	}
	reqs, err := Schedule(cfg)
	if err != nil {
		return Report{}, err
	}
	if last := reqs[len(reqs)-1].At; cfg.Warmup > last {
		return Report{}, fmt.Errorf("replay: warmup: %v is longer than all arrivals (%v)", cfg.Warmup, last)
	}
	c, err := newClient(cfg)
	if err != nil {
		return Report{}, err
	}
	defer c.close()
	cpu, err := newCPUMeter(cfg.PIDs)
	if err != nil {
		return Report{}, err
	}
	r := &run{cfg: cfg, reqs: reqs, client: c, tally: newTally(cfg), cpu: cpu}
	r.send(ctx)
	rep := newReport(r, ctx.Err() != nil)
	rep.Lifecycle = c.selector.report()
	rep.Sims = simStats(context.WithoutCancel(ctx), cfg.StatsURLs)
	rep.Validity = newValidity(&rep, len(cfg.PIDs) > 0)
	return rep, write(rep, cfg.JSON, out)
}

// run is one run under way.
type run struct {
	cfg    Config
	reqs   []Request
	client *client
	tally  *tally
	cpu    *cpuMeter

	warmup   int // requests sent before counting began; set by dispatch
	inFlight atomic.Int64
	cpuUsed  cpuUse // set by send
}

// built is a request whose body is ready.
type built struct {
	req      *Request
	body     []byte
	question []byte // to the selection service, if there is one
	oracle   []byte // the question to it, likewise
}

// send sends all requests and returns when each has ended.
func (r *run) send(ctx context.Context) {
	stop, stopHelpers := context.WithCancel(ctx)
	var helpers sync.WaitGroup
	ready := make(chan built, builtAhead)
	helpers.Go(func() { r.build(stop, ready) })
	if r.cfg.Progress {
		helpers.Go(func() { r.progress(stop) })
	}
	r.dispatch(ctx, ready)
	r.cpuUsed = r.cpu.stop()
	stopHelpers()
	helpers.Wait()
}

// build makes bodies a little ahead of their time, so that making them delays none.
func (r *run) build(ctx context.Context, ready chan<- built) {
	defer close(ready)
	for i := range r.reqs {
		req := &r.reqs[i]
		select {
		case ready <- built{req, r.client.bodies.build(req), r.client.selector.build(req), r.client.oracle.build(req)}:
		case <-ctx.Done():
			return
		}
	}
}

// dispatch starts each request at its time, whatever became of those before, and waits for all.
func (r *run) dispatch(ctx context.Context, ready <-chan built) {
	start := time.Now().Add(lead)
	timer := time.NewTimer(lead)
	defer timer.Stop()
	var open sync.WaitGroup
	defer open.Wait()
	counting := false
	for b := range ready {
		counted := b.req.At >= r.cfg.Warmup
		if counted && !counting {
			counting = true
			r.cpu.start(time.Now())
		}
		due := start.Add(b.req.At)
		timer.Reset(time.Until(due.Add(-r.client.oracle.lead())))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		r.launch(ctx, &open, b, due, counted)
	}
}

// launch starts one request that is due, unless too many are open.
func (r *run) launch(ctx context.Context, open *sync.WaitGroup, b built, due time.Time, counted bool) {
	room := r.inFlight.Load() < int64(r.cfg.MaxInFlight) // only launch raises it
	if counted {
		r.tally.offer(due, room)
	} else {
		r.warmup++
	}
	if !room {
		return
	}
	r.inFlight.Add(1)
	open.Go(func() {
		defer r.inFlight.Add(-1)
		r.client.send(ctx, b, due, func(res result, s *stream) {
			if counted {
				r.tally.add(b.req, due, res, s)
			}
		})
	})
}

// progress prints a line now and then until ctx ends.
func (r *run) progress(ctx context.Context) {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		t := r.tally
		t.mu.Lock()
		line := fmt.Sprintf("offered %d of %d, in flight %d, completed %d, good %d, shed %d, failed %d\n", t.offered, len(r.reqs),
			r.inFlight.Load(), t.completed, t.good.requests, total(t.shedBy), total(t.failedBy))
		t.mu.Unlock()
		fmt.Fprint(os.Stderr, line)
	}
}
