package monitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"spillway/kvindex"
	"spillway/wire"
	"spillway/worker"
)

// KVState is what a listener does.
type KVState string

// The states. Failures are retried.
const (
	KVPending KVState = "pending" // waits for a connection, or for the end of recovery
	KVActive  KVState = "active"  // is connected with its publisher
	KVPaused  KVState = "paused"  // stopped on purpose
	KVFailed  KVState = "failed"  // the last attempt to connect ended with an error
)

// KVStates are all of them.
var KVStates = []KVState{KVPending, KVActive, KVPaused, KVFailed}

// KVStatus is how a listener fares.
type KVStatus struct {
	Rank      worker.Rank
	Endpoint  string
	State     KVState
	LastError string        // of the last attempt, "" if it went well
	Degraded  bool          // batches were lost since the publisher's process began, so blocks may be missing or stale
	Applied   *uint64       // sequence number of the last batch applied, nil if there is none
	Waiting   int           // batches received and not yet applied
	Age       time.Duration // since the last batch came, or since the listener began
	Strangers []uint32      // ranks that were never registered but came up in its events
}

// maxFedRanks bounds the ranks that one publisher may speak for.
const maxFedRanks = worker.MaxReportedRanks

// kvListener listens to one publisher.
type kvListener struct {
	k      *KVListeners
	worker *kvWorker
	source KVSource
	queue  *kvQueue
	done   chan struct{} // closed by end
	gone   bool          // guarded by worker.writing: nothing is applied any more

	mu         sync.Mutex // guards the fields below; nothing is called while it is held
	state      KVState
	lastError  string
	generation uint64 // of the current attempt
	degraded   bool
	applied    sequence
	heard      time.Time // when the last batch came, or the listener began
	silent     bool      // no batch has ever come
	strangers  []uint32

	linked bool // there has been a connection; belongs to the goroutine that receives

	// What follows belongs to the goroutine of run.
	cursor     cursor
	digest     uint64 // of the payload of the last batch applied
	link       kvLink
	batch      wire.KVBatch
	normalizer *wire.KVNormalizer
	counted    wire.KVCounts       // those of normalizer that are in the metrics
	fed        map[uint32]bool     // true: ranks that it has written for; its own is always there
	apply      func(*wire.KVEvent) // l.write, made once
	warnings   [kvWarnings]warning
}

func newKVListener(k *KVListeners, w *kvWorker, s KVSource, now time.Time) *kvListener {
	l := &kvListener{
		k: k, worker: w, source: s, queue: newKVQueue(&k.queued), done: make(chan struct{}),
		state: KVPending, heard: now, silent: true,
		normalizer: wire.NewKVNormalizer(s.Rank, s.BlockSize), fed: map[uint32]bool{s.Rank.DP: false},
	}
	l.apply = l.write
	return l
}

// end ends the listener: when it returns, nothing is applied any more. The lock of KVListeners is
// held.
func (l *kvListener) end() {
	close(l.done)
	l.worker.writing.Lock()
	l.gone = true
	l.worker.writing.Unlock()
	for _, mark := range l.queue.close() {
		mark.reached <- struct{}{} // has room
	}
}

// attempt is the number of the attempt to connect that is wanted, and whether one is.
func (l *kvListener) attempt() (generation uint64, wanted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.generation, l.state != KVPaused
}

// setState tells what has become of an attempt, unless it is no longer the current one.
func (l *kvListener) setState(generation uint64, state KVState, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if generation != l.generation || l.state == KVPaused {
		return
	}
	l.state = state
	if err != nil {
		l.lastError = err.Error()
	} else if state == KVActive {
		l.lastError = ""
	}
}

// change pauses or resumes. It tells whether that was possible.
func (l *kvListener) change(pause bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	runs := l.state == KVPending || l.state == KVActive
	if runs != pause {
		return false
	}
	l.generation++
	l.state, l.lastError = KVPending, ""
	if pause {
		l.state = KVPaused
	}
	return true
}

func (l *kvListener) status() KVStatus {
	l.mu.Lock()
	s := KVStatus{
		Rank: l.source.Rank, Endpoint: l.source.Endpoint, State: l.state, LastError: l.lastError, Degraded: l.degraded,
		Age: time.Since(l.heard), Strangers: l.strangers,
	}
	if l.applied.known {
		s.Applied = new(l.applied.number)
	}
	if s.State == KVActive && !l.k.open() {
		s.State = KVPending
	}
	l.mu.Unlock()
	s.Waiting = l.queue.depth()
	return s
}

// hear takes in a message. It is called by the goroutine that receives.
func (l *kvListener) hear(frames [][]byte, now time.Time) {
	m := l.k.metrics
	m.received.Inc()
	b, ok := parseLive(frames)
	if !ok {
		m.errors[kvErrorFrames].Inc()
		return
	}
	l.mu.Lock()
	l.heard, l.silent = now, false
	l.mu.Unlock()
	if !l.queue.put(b) {
		m.dropped.Inc()
	}
}

// tellSilence warns once of a publisher that has never sent anything.
func (l *kvListener) tellSilence(now time.Time) {
	l.mu.Lock()
	tell := l.silent && l.state != KVPaused && now.Sub(l.heard) >= l.k.cfg.SilentAfter
	state := l.state
	if tell {
		l.silent = false
	}
	l.mu.Unlock()
	if tell {
		l.k.log.Warn("no KV event has come from a worker since it was registered; are they enabled in its engine?",
			"worker", l.source.Rank.Worker, "dp_rank", l.source.Rank.DP, "endpoint", l.source.Endpoint, "state", state)
	}
}

// run applies what comes until the listener or ctx ends.
func (l *kvListener) run(ctx context.Context) {
	select {
	case <-l.k.opened:
	case <-l.done:
		return
	case <-ctx.Done():
		return
	}
	var batches []kvBatch
	for {
		select {
		case <-l.queue.filled:
		case <-l.link.again:
			l.check(ctx)
			continue
		case <-l.done:
			return
		case <-ctx.Done():
			return
		}
		batches = l.queue.take(batches[:0])
		for i := range batches {
			b := &batches[i]
			switch {
			case b.reached != nil:
				b.reached <- struct{}{} // has room
			case l.over(ctx):
			case b.news != 0:
				l.learn(ctx, b.news)
			default:
				l.take(ctx, b)
			}
			l.queue.done(b)
		}
	}
}

// over tells whether the listener or ctx has ended.
func (l *kvListener) over(ctx context.Context) bool {
	select {
	case <-l.done:
		return true
	default:
		return ctx.Err() != nil
	}
}

// take does what a batch that came live asks for.
func (l *kvListener) take(ctx context.Context, b *kvBatch) {
	l.link.heard = true
	a := l.cursor.arrive(b.seq)
	if a.restarted {
		l.forget()
	}
	if a.begins {
		l.void() // a peer may not have heard of the restart when we took over what it knew
	}
	if a.skip {
		return
	}
	if a.missing > 0 {
		l.fill(ctx, a, b)
		if l.over(ctx) {
			return
		}
	}
	ok, lost := l.cursor.apply(b.seq)
	l.lose(lost, b.seq)
	if !ok {
		return // a replay has brought it
	}
	if l.decode(b.payload) {
		l.use()
	}
	l.settle(b.seq, b.payload)
}

// forget drops all that came from a publisher whose process is no more.
func (l *kvListener) forget() {
	l.k.metrics.restarts.Inc()
	l.k.log.Info("a publisher of KV events has begun anew", "worker", l.source.Rank.Worker, "dp_rank", l.source.Rank.DP)
	l.normalizer.Reset()
	l.void()
	l.link.doubted, l.link.blamed = sequence{}, time.Time{}
	l.mu.Lock()
	l.degraded, l.applied = false, sequence{}
	l.mu.Unlock()
}

// void empties the index of the ranks that the publisher speaks for.
func (l *kvListener) void() {
	l.worker.writing.Lock()
	defer l.worker.writing.Unlock()
	if l.gone {
		return
	}
	for dp := range l.fed {
		l.worker.index.Clear(worker.Rank{Worker: l.source.Rank.Worker, DP: dp})
	}
}

// fill asks the engine for what is missing before batch b, if it can be asked.
func (l *kvListener) fill(ctx context.Context, a arrival, b *kvBatch) {
	l.k.metrics.gaps.Inc()
	if l.source.Replay == "" {
		return
	}
	ours := l.rankOf(b.payload)
	outcome, err := l.replay(ctx, a.from, func(seq uint64, payload []byte) string { return l.catchUp(seq, payload, ours) })
	l.tellReplay(outcome, err)
}

// catchUp applies a batch of a replay, unless that was done before. It is the use of replay; ours is
// the rank that the batches should be of.
func (l *kvListener) catchUp(seq uint64, payload []byte, ours uint32) string {
	good := l.decode(payload)
	if good && l.batch.HasRank && l.batch.Rank != ours && !l.fed[l.batch.Rank] {
		return replayRank
	}
	ok, lost := l.cursor.apply(seq)
	l.lose(lost, seq)
	if ok {
		l.k.metrics.replayed.Inc()
		if good {
			l.use()
		}
		l.settle(seq, payload)
	}
	return ""
}

// tellReplay tells what has become of a replay.
func (l *kvListener) tellReplay(outcome string, err error) {
	if outcome == "" {
		return // it is over
	}
	l.k.metrics.replays[outcome].Inc()
	if outcome != replayComplete {
		l.warn(kvWarnReplay, "a replay of KV events has failed", "outcome", outcome, "endpoint", l.source.Replay, "err", err)
	}
}

// rankOf is the rank that a batch is of, or, if it cannot be read, the registered one.
func (l *kvListener) rankOf(payload []byte) uint32 {
	if l.batch.Decode(payload) == nil && l.batch.HasRank {
		return l.batch.Rank
	}
	return l.source.Rank.DP
}

// lose counts batches that will never come.
func (l *kvListener) lose(batches, before uint64) {
	if batches == 0 {
		return
	}
	l.k.metrics.lost.Add(float64(batches))
	l.mu.Lock()
	l.degraded = true
	l.mu.Unlock()
	l.warn(kvWarnLost, "KV events are lost", "batches", batches, "before", before)
}

// settle notes that a batch has been applied.
func (l *kvListener) settle(seq uint64, payload []byte) {
	l.digest = xxh3.Hash(payload)
	l.mu.Lock()
	l.applied = sequence{seq, true}
	l.mu.Unlock()
}

// decode reads a payload into l.batch. It tells whether that could be done.
func (l *kvListener) decode(payload []byte) bool {
	err := l.batch.Decode(payload)
	if err != nil {
		l.k.metrics.errors[kvErrorBatch].Inc()
		l.warn(kvWarnDecode, "a batch of KV events cannot be read", "err", err)
	}
	return err == nil
}

// use applies l.batch.
func (l *kvListener) use() {
	l.worker.writing.Lock()
	if !l.gone {
		l.normalizer.Each(&l.batch, l.apply)
	}
	l.worker.writing.Unlock()
	for reason, kind := range kvMistakes {
		if n := l.normalizer.Counts[reason] - l.counted[reason]; n > 0 {
			l.warn(kind, "blocks of KV events make no sense", "reason", reason.String(), "events", n)
		}
	}
	l.k.metrics.count(&l.counted, &l.normalizer.Counts)
}

// kvMistakes are what of a normaliser's counts means that a worker is registered or programmed
// wrongly.
var kvMistakes = map[wire.KVReason]int{
	wire.KVBlockSize: kvWarnBlockSize, wire.KVShortTokens: kvWarnTokens, wire.KVSelfReference: kvWarnHashes,
}

// write applies one event to the index.
func (l *kvListener) write(e *wire.KVEvent) {
	if !l.fed[e.Rank.DP] && !l.feed(e.Rank.DP) {
		l.k.metrics.strangers.Inc()
		return
	}
	m := l.k.metrics
	status, unknown := applyKV(l.worker.index, e)
	switch {
	case e.Kind == wire.KVStore:
		m.stored[status].Inc()
		if status == kvindex.DuplicateStore {
			m.duplicates.Inc()
		}
	case e.Kind == wire.KVClear:
		m.cleared.Inc()
	case unknown > 0:
		m.removedUnknown.Inc()
	default:
		m.removed.Inc()
	}
}

// feed notes that events are of a rank for the first time. It tells whether there is room for it.
func (l *kvListener) feed(dp uint32) bool {
	_, own := l.fed[dp]
	if !own && len(l.fed) >= maxFedRanks {
		return false
	}
	l.fed[dp] = true
	if !own {
		l.mu.Lock()
		l.strangers = append(slices.Clip(l.strangers), dp)
		l.mu.Unlock()
	}
	return true
}

// spoken are the ranks but its own that the publisher has spoken for, read-only.
func (l *kvListener) spoken() []uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.strangers
}

// What a listener warns of.
const (
	kvWarnLost = iota
	kvWarnReplay
	kvWarnDecode
	kvWarnBlockSize
	kvWarnTokens
	kvWarnHashes
	kvWarnings
)

// warnEvery is the least time between two warnings of a listener about the same.
const warnEvery = 10 * time.Second

// warning is when a warning was last logged, and how often it was not since.
type warning struct {
	at   time.Time
	held int
}

// warn logs a warning, unless the same was logged just now.
func (l *kvListener) warn(kind int, msg string, args ...any) {
	w, now := &l.warnings[kind], time.Now()
	if !w.at.IsZero() && now.Sub(w.at) < warnEvery {
		w.held++
		return
	}
	l.k.log.Warn(msg, append(args, "worker", l.source.Rank.Worker, "dp_rank", l.source.Rank.DP, "not_logged", w.held)...)
	*w = warning{at: now}
}
