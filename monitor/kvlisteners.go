package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/kvindex"
	"spillway/worker"
)

// Why a listener cannot be had, or not be changed.
var (
	ErrKVEndpoint   = errors.New("bad endpoint")                   // of events or of replays
	ErrKVRegistered = errors.New("the rank is registered already") // it has a listener
	ErrKVTooMany    = errors.New("too many listeners")
	ErrKVUnknown    = errors.New("the rank has no listener")
	ErrKVState      = errors.New("not in this state") // pausing what is paused, resuming what runs
)

// maxKVListeners bounds the listeners of one process: each has sockets, and a goroutine.
const maxKVListeners = 4096

// KVSource is a publisher of KV events: the socket of an engine for one rank.
type KVSource struct {
	Rank      worker.Rank
	Endpoint  string // where it publishes; see worker.CheckEventEndpoint
	Replay    string // where it sends what was lost, "" for nowhere
	BlockSize uint32 // tokens per block, of the partition
	Index     *kvindex.Index
}

// KVListeners listen to the KV events of workers and write what these hold into the indexes of
// their partitions. Its methods are safe for concurrent use, also before and during Run.
type KVListeners struct {
	cfg        KVConfig
	log        *slog.Logger
	metrics    *kvMetrics
	partitions *kvindex.Partitions
	changed    chan struct{} // holds one token while Run has new listeners to look at
	opened     chan struct{} // closed when batches may be applied
	ready      chan struct{} // closed when those are applied that had come by then
	replays    chan struct{} // has a token for each replay that goes on
	queued     atomic.Int64  // bytes that wait in all queues

	mu      sync.Mutex // guards the fields below; taken before the lock of a worker and of a listener
	workers map[worker.ID]*kvWorker
	count   int // of listeners
	running bool
}

// kvWorker is a worker that has listeners.
type kvWorker struct {
	index     *kvindex.Index         // read-only
	listeners map[uint32]*kvListener // by rank; guarded by KVListeners.mu
	writing   sync.Mutex             // held while events of the worker are applied; guards gone of its listeners
}

// NewKVListeners returns one without listeners. cfg must be valid. Indexes belong to partitions.
// reg must not have another one's metrics.
func NewKVListeners(cfg KVConfig, partitions *kvindex.Partitions, log *slog.Logger, reg prometheus.Registerer) *KVListeners {
	k := &KVListeners{
		cfg: cfg, log: log, partitions: partitions, changed: make(chan struct{}, 1), opened: make(chan struct{}),
		ready: make(chan struct{}), replays: make(chan struct{}, maxKVReplays), workers: map[worker.ID]*kvWorker{},
	}
	k.metrics = newKVMetrics(k, reg)
	return k
}

// Register begins to listen to a publisher, which need not be there yet. It fails with
// ErrKVEndpoint, ErrKVRegistered or ErrKVTooMany; then nothing has changed. All ranks of a worker
// have the same index.
func (k *KVListeners) Register(s KVSource) error {
	for _, e := range []string{s.Endpoint, s.Replay} {
		if err := worker.CheckEventEndpoint(e); err != nil && (e != "" || e == s.Endpoint) {
			return fmt.Errorf("%w: %w", ErrKVEndpoint, err)
		}
	}
	if s.Replay != "" && worker.Binds(s.Replay) {
		return fmt.Errorf("%w: %q: nobody can be asked at *", ErrKVEndpoint, s.Replay)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	w := k.workers[s.Rank.Worker]
	if w != nil && w.listeners[s.Rank.DP] != nil {
		return fmt.Errorf("%w: worker %v, rank %d", ErrKVRegistered, s.Rank.Worker, s.Rank.DP)
	}
	if k.count >= maxKVListeners {
		return fmt.Errorf("%w: there are %d", ErrKVTooMany, k.count)
	}
	if w == nil {
		w = &kvWorker{index: s.Index, listeners: map[uint32]*kvListener{}}
		k.workers[s.Rank.Worker] = w
	}
	w.listeners[s.Rank.DP] = newKVListener(k, w, s, time.Now())
	k.count++
	k.poke()
	if s.BlockSize == 1 {
		k.log.Warn("blocks of one token make as many KV events as there are tokens", "worker", s.Rank.Worker, "dp_rank", s.Rank.DP)
	}
	return nil
}

// Unregister ends listening to one rank and forgets what it holds, and what ranks hold that only its
// publisher has told of; with the last rank of a worker all that came from the worker. It fails with ErrKVUnknown. When it returns, no event of the rank
// is applied any more.
func (k *KVListeners) Unregister(r worker.Rank) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	w := k.workers[r.Worker]
	if w == nil || w.listeners[r.DP] == nil {
		return fmt.Errorf("%w: worker %v, rank %d", ErrKVUnknown, r.Worker, r.DP)
	}
	if len(w.listeners) == 1 {
		k.removeLocked(r.Worker, w)
		return nil
	}
	l := w.listeners[r.DP]
	delete(w.listeners, r.DP)
	k.count--
	l.end()
	w.writing.Lock()
	defer w.writing.Unlock()
	w.index.RemoveRank(r)
	for _, dp := range l.spoken() {
		if !w.told(dp) {
			w.index.RemoveRank(worker.Rank{Worker: r.Worker, DP: dp})
		}
	}
	k.poke()
	return nil
}

// told tells whether a publisher is listened to that is, or has spoken, for a rank. The lock of
// KVListeners is held, and that of writing.
func (w *kvWorker) told(dp uint32) bool {
	if w.listeners[dp] != nil {
		return true
	}
	for _, l := range w.listeners {
		if slices.Contains(l.spoken(), dp) {
			return true
		}
	}
	return false
}

// UnregisterWorker is Unregister for all ranks of a worker.
func (k *KVListeners) UnregisterWorker(id worker.ID) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	w := k.workers[id]
	if w == nil {
		return fmt.Errorf("%w: worker %v", ErrKVUnknown, id)
	}
	k.removeLocked(id, w)
	return nil
}

func (k *KVListeners) removeLocked(id worker.ID, w *kvWorker) {
	for _, l := range w.listeners {
		l.end()
	}
	k.count -= len(w.listeners)
	delete(k.workers, id)
	w.writing.Lock()
	defer w.writing.Unlock()
	w.index.RemoveWorker(id)
	k.poke()
}

// Pause stops listening to a rank, whose place in the sequence is kept. It fails with ErrKVUnknown,
// and with ErrKVState unless the listener is pending or active.
func (k *KVListeners) Pause(r worker.Rank) error { return k.change(r, true) }

// Resume takes up listening again, after Pause or, without waiting, after a failure. What came
// meanwhile is a gap. It fails with ErrKVUnknown, and with ErrKVState if the listener is neither
// paused nor failed.
func (k *KVListeners) Resume(r worker.Rank) error { return k.change(r, false) }

func (k *KVListeners) change(r worker.Rank, pause bool) error {
	l := k.listener(r)
	if l == nil {
		return fmt.Errorf("%w: worker %v, rank %d", ErrKVUnknown, r.Worker, r.DP)
	}
	if !l.change(pause) {
		return fmt.Errorf("%w: worker %v, rank %d", ErrKVState, r.Worker, r.DP)
	}
	k.poke()
	return nil
}

func (k *KVListeners) listener(r worker.Rank) *kvListener {
	k.mu.Lock()
	defer k.mu.Unlock()
	if w := k.workers[r.Worker]; w != nil {
		return w.listeners[r.DP]
	}
	return nil
}

// all returns the listeners there are, in no particular order.
func (k *KVListeners) all() []*kvListener {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]*kvListener, 0, k.count)
	for _, w := range k.workers {
		for _, l := range w.listeners {
			all = append(all, l)
		}
	}
	return all
}

// Statuses tells how all listeners fare, by worker and rank.
func (k *KVListeners) Statuses() []KVStatus {
	var all []KVStatus
	for _, l := range k.all() {
		all = append(all, l.status())
	}
	slices.SortFunc(all, func(a, b KVStatus) int {
		return cmp.Or(cmp.Compare(a.Rank.Worker, b.Rank.Worker), cmp.Compare(a.Rank.DP, b.Rank.DP))
	})
	return all
}

// open tells whether batches may be applied.
func (k *KVListeners) open() bool {
	select {
	case <-k.opened:
		return true
	default:
		return false
	}
}

// Recovered is closed when Ready begins to report true.
func (k *KVListeners) Recovered() <-chan struct{} { return k.ready }

// Ready tells whether recovery is over: what peers had is in the indexes, and so is what workers
// had sent by the end of it.
func (k *KVListeners) Ready() bool {
	select {
	case <-k.ready:
		return true
	default:
		return false
	}
}

// Flush waits until all batches are applied that were received before the call, or until ctx ends.
// Before recovery is over nothing is applied.
func (k *KVListeners) Flush(ctx context.Context) error {
	all := k.all()
	reached := make(chan struct{}, len(all))
	for _, l := range all {
		if !l.queue.put(kvBatch{reached: reached}) {
			reached <- struct{}{} // it has ended
		}
	}
	for range all {
		select {
		case <-reached:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// poke has Run look at what changed.
func (k *KVListeners) poke() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// Run recovers what peers know, listens until ctx ends and then returns nil; nothing that it
// started is left. It is called once; a second call returns ErrRunning.
func (k *KVListeners) Run(ctx context.Context) error {
	k.mu.Lock()
	running := k.running
	k.running = true
	k.mu.Unlock()
	if running {
		return ErrRunning
	}
	ctx, cancel := context.WithCancel(ctx)
	var loops sync.WaitGroup
	defer loops.Wait()
	defer cancel()
	loops.Go(func() { k.recover(ctx) })
	started := map[*kvListener]bool{}
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		if err := k.receive(ctx, started, &loops); err != nil {
			k.log.Error("KV events cannot be received", "err", err)
		}
		if !pause(ctx, retry) {
			return nil
		}
	}
}
