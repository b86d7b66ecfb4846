package main

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

var (
	trackerMeasure = flag.Bool("slottracker.measure", false, "run TestSlotTrackerCost, which measures times: for a quiet machine")
	replicaMeasure = flag.Bool("replica.measure", false, "run TestFullQueue, which judges times: for a machine that is not too busy")
)

// cell is one load, and the original's figures for it: slot-tracker.md 10.2.
type cell struct {
	conns, ranks, blocks      int
	potential, triple, health float64 // requests a second
}

var cells = []cell{
	{1, 64, 128, 10100, 11500, 22500}, {16, 8, 128, 27100, 18500, 27200},
	{16, 64, 128, 18100, 17600, 30800}, {16, 64, 1024, 8300, 8500, 25100},
}

const (
	measureWindow = 3 * time.Second
	addBatch      = 2000 // requests that are added before they are freed, where one route is measured
)

// TestSlotTrackerCost prints requests a second and the server's processor time for each, over
// keep-alive connections, beside the original's figures. Clients run on the same processors. It
// judges nothing: that is for a quiet machine and its reader.
//
//	go test -run '^TestSlotTrackerCost$' -v ./cmd/spillway -slottracker.measure
func TestSlotTrackerCost(t *testing.T) {
	if !*trackerMeasure {
		t.Skip("measures times; -slottracker.measure runs it")
	}
	fmt.Println("| connections | ranks | blocks | call | requests/s | p50 µs | p99 µs | server's CPU µs/request | original's requests/s | ratio |")
	for _, c := range cells {
		s := startSlotTracker(t, "--log-level", "error")
		conns := dialLean(t, s.url, c.conns)
		fillRanks(t, conns[0], c.ranks, 8, c.blocks)
		prompt := promptText(c.blocks, 1<<40)
		add := func(l *leanConn, i int64) error {
			return l.post("/add", `{"model_name":"m","request_id":"r`, strconv.FormatInt(i, 10), `","worker_id":`, strconv.FormatInt(i/8%int64(c.ranks/8), 10),
				`,"dp_rank":`, strconv.FormatInt(i%8, 10), `,"new_isl_tokens":2048,"sequence_hashes":[`, prompt, `]}`)
		}
		named := func(path string) func(l *leanConn, i int64) error {
			return func(l *leanConn, i int64) error {
				return l.post(path, `{"model_name":"m","request_id":"r`, strconv.FormatInt(i, 10), `"}`)
			}
		}
		completed, freed := named("/prefill_complete"), named("/free")
		potential := func(l *leanConn, _ int64) error {
			return l.post("/potential_loads", `{"model_name":"m","new_isl_tokens":2048,"sequence_hashes":[`, prompt, `]}`)
		}
		drive(t, conns, measureWindow/3, 0, potential) // warms up

		s.row(c, conns, "potential_loads", 1, c.potential, potential)
		s.row(c, conns, "add, prefill_complete, free", 3, c.triple, func(l *leanConn, i int64) error {
			return errors.Join(add(l, i), completed(l, i), freed(l, i))
		})
		s.row(c, conns, "health", 1, c.health, func(l *leanConn, _ int64) error { return l.health() })
		s.batches(c, conns, []string{"add", "prefill_complete", "free"}, []func(*leanConn, int64) error{add, completed, freed})
		s.signal(9)
		s.exit()
	}
}

// spending is what some calls took.
type spending struct {
	calls     int
	took, cpu time.Duration
	all       latencies
}

func (s slotTracker) spend(conns []*leanConn, to *spending, during time.Duration, n int64, calls int, call func(*leanConn, int64) error) {
	s.t.Helper()
	cpu, began := processorTime(s.t, s.cmd.Process.Pid), time.Now()
	all := drive(s.t, conns, during, n, call)
	to.took += time.Since(began)
	to.cpu += processorTime(s.t, s.cmd.Process.Pid) - cpu
	to.calls += calls * len(all)
	to.all = append(to.all, all...)
}

func (to *spending) print(c cell, name string, original float64) {
	fmt.Printf("| %d | %d | %d | %s %s\n", c.conns, c.ranks, c.blocks, name, to.figures(original))
}

// figures are the cells of a row from requests a second on, beside those to compare them with.
func (to *spending) figures(other float64) string {
	slices.Sort(to.all)
	micro := func(q float64) float64 {
		return float64(to.all[int(q*float64(len(to.all)-1))].Nanoseconds()) / 1000
	}
	rate := float64(to.calls) / to.took.Seconds()
	compared := "| - | - |"
	if other > 0 {
		compared = fmt.Sprintf("| %.0f | %.2f |", other, rate/other)
	}
	return fmt.Sprintf("| %.0f | %.0f | %.0f | %.1f %s", rate, micro(0.5), micro(0.99), float64(to.cpu.Microseconds())/float64(to.calls), compared)
}

// row measures one kind of call, or of some in a row.
func (s slotTracker) row(c cell, conns []*leanConn, name string, calls int, original float64, call func(*leanConn, int64) error) {
	var to spending
	s.spend(conns, &to, measureWindow, 0, calls, call)
	to.print(c, name, original)
}

// batches measures the calls of a request's life by themselves.
func (s slotTracker) batches(c cell, conns []*leanConn, names []string, calls []func(*leanConn, int64) error) {
	to := make([]spending, len(calls))
	for until := time.Now().Add(2 * measureWindow); time.Now().Before(until); {
		for i, call := range calls {
			s.spend(conns, &to[i], 0, addBatch, 1, call)
		}
	}
	for i, name := range names {
		to[i].print(c, name+" alone", 0)
	}
}

const (
	fullRounds  = 15
	fullSlower  = 1.2 // p99 with a full queue over p99 without
	fullClients = 8
)

// TestFullQueue measures calls to two slot trackers in turns, so that whatever else the machine does falls on
// both. One has nobody to tell of them. The other has a peer that takes less than it is told, and a
// queue that is full as soon as one event waits.
//
//	go test -run '^TestFullQueue$' -v ./cmd/spillway -replica.measure
func TestFullQueue(t *testing.T) {
	if !*replicaMeasure {
		t.Skip("measures times; -replica.measure runs it")
	}
	trackers := [2]*syncedTracker{startSynced(t, anyEndpoint), startSynced(t, anyEndpoint, "--replica-sync-queue", "1")}
	conns := [2][]*leanConn{}
	prompt := promptText(128, 1)
	drops := func(i int) float64 { return trackers[i].metric(`spillway_replica_unsent_total{reason="queue"}`) }
	life := func(c *leanConn, i int64) error {
		id := strconv.FormatInt(i, 10)
		return errors.Join(
			c.post("/add", `{"model_name":"m","request_id":"`, id, `","worker_id":7,"dp_rank":0,"new_isl_tokens":9,"sequence_hashes":[`, prompt, `]}`),
			c.post("/prefill_complete", `{"model_name":"m","request_id":"`, id, `"}`), c.post("/free", `{"model_name":"m","request_id":"`, id, `"}`))
	}
	for i, s := range trackers {
		conns[i] = dialLean(t, s.url, fullClients)
		drive(t, conns[i], time.Second, 0, life)
	}
	leave := trackers[1].lag()
	defer leave()
	eventually(t, "a peer that is too slow", func() bool {
		drive(t, conns[1], 100*time.Millisecond, 0, life)
		return trackers[1].metric("spillway_replica_slow_total") > 0
	})
	var ratios50, ratios99 []float64
	before := [2]float64{drops(0), drops(1)}
	for round := range fullRounds {
		var p50, p99 [2]time.Duration
		for i := range 2 {
			i = (i + round) % 2
			all := drive(t, conns[i], 2*time.Second, 0, life)
			slices.Sort(all)
			p50[i], p99[i] = all[len(all)/2], all[len(all)*99/100]
		}
		ratios50 = append(ratios50, float64(p50[1])/float64(p50[0]))
		ratios99 = append(ratios99, float64(p99[1])/float64(p99[0]))
		t.Logf("round %d: p50 %v without, %v with; p99 %v without, %v with, ratio %.2f", round, p50[0], p50[1], p99[0], p99[1], ratios99[round])
	}
	without, with := drops(0)-before[0], drops(1)-before[1]
	t.Logf("three calls, %d rounds: median ratio of p50 %.3f, of p99 %.3f; drops %.0f without, %.0f with; a peer too slow %.0f times",
		fullRounds, median(ratios50), median(ratios99), without, with, trackers[1].metric("spillway_replica_slow_total"))
	if median(ratios99) > fullSlower {
		t.Errorf("with a full queue p99 is %.2f times that without, want at most %v", median(ratios99), fullSlower)
	}
	if with == 0 || without > 0 {
		t.Errorf("%v events were dropped without a full queue and %v with one", without, with)
	}
}

// lag is a peer that takes some events now and then, until leave.
func (s *syncedTracker) lag() (leave func()) {
	s.t.Helper()
	soc, err := zmq.NewSocket(zmq.SUB)
	if err == nil {
		err = errors.Join(soc.SetRcvhwm(1), soc.SetRcvbuf(4096), soc.SetLinger(0), soc.SetSubscribe(""), soc.Connect(s.endpoint))
	}
	if err != nil {
		s.t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- soc.Close()
				return
			case <-time.After(100 * time.Millisecond):
			}
			for range 200 {
				if _, err := soc.RecvMessageBytes(zmq.DONTWAIT); err != nil {
					break // nothing is there
				}
			}
		}
	}()
	return func() {
		close(stop)
		if err := <-stopped; err != nil {
			s.t.Error(err)
		}
	}
}
