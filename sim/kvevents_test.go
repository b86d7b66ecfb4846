package sim_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/kvhash"
	"spillway/sim"
	"spillway/wire"
	"spillway/worker"
)

const patience = time.Minute // for what must happen, on a slow machine

// cacheBlock is a block of GET /sim/cache.
type cacheBlock struct {
	Engine uint64  `json:"block_hash"`
	Local  uint64  `json:"tokens_hash"`
	Parent *uint64 `json:"parent_hash"`
}

type cacheRank struct {
	DPRank   int          `json:"dp_rank"`
	Sequence *uint64      `json:"sequence"`
	Dropped  uint64       `json:"batches_dropped"`
	Blocks   []cacheBlock `json:"blocks"`
}

type cacheState struct {
	BlockSize int `json:"block_size"`
	Workers   []struct {
		Ranks []cacheRank `json:"ranks"`
	} `json:"workers"`
}

func cacheOf(t *testing.T, url string) cacheState {
	t.Helper()
	code, data := get(t, url+"/sim/cache")
	if code != http.StatusOK {
		t.Fatalf("GET /sim/cache = %d %s", code, data)
	}
	return decode[cacheState](t, data)
}

// freePorts finds n ports in a row that nobody listens on.
func freePorts(t *testing.T, n int) int {
	t.Helper()
search:
	for range 1000 {
		first := 10_000 + rand.IntN(20_000) // below those that the system gives to connections
		for i := range n {
			ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+i))
			if err != nil {
				continue search
			}
			if err := ln.Close(); err != nil {
				t.Fatal(err)
			}
		}
		return first
	}
	t.Fatal("no free ports")
	return 0
}

// socket is a client's, with receives that give up soon enough to look at the time.
func socket(t *testing.T, zctx *zmq.Context, kind zmq.Type, port int) *zmq.Socket {
	t.Helper()
	s, err := zctx.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	err = errors.Join(s.SetLinger(0), s.SetRcvtimeo(100*time.Millisecond), s.SetRcvhwm(0), s.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", port)))
	if err == nil && kind == zmq.SUB {
		err = s.SetSubscribe("")
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newContext(t *testing.T) *zmq.Context {
	t.Helper()
	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := zctx.Term(); err != nil {
			t.Error(err)
		}
	})
	return zctx
}

// follower keeps a slow and obvious copy of one rank's cache, by its events alone.
type follower struct {
	t         *testing.T
	sub       *zmq.Socket
	dealer    *zmq.Socket
	frames    int // of a reply, as its client sees it
	normal    *wire.KVNormalizer
	rank      worker.Rank
	blocks    map[uint64]cacheBlock
	next      uint64 // sequence number
	live      uint64 // batches applied that came over the SUB socket
	kinds     map[wire.KVKind]int
	published []byte // the last payload
}

func newFollower(t *testing.T, zctx *zmq.Context, cfg sim.Config, dp int) *follower {
	rank := worker.Rank{Worker: 7, DP: uint32(dp)}
	f := &follower{
		t: t, normal: wire.NewKVNormalizer(rank, uint32(cfg.BlockSize)), rank: rank, frames: 3,
		blocks: map[uint64]cacheBlock{}, kinds: map[wire.KVKind]int{},
		sub:    socket(t, zctx, zmq.SUB, cfg.KVEventsPort+dp),
		dealer: socket(t, zctx, zmq.DEALER, cfg.KVReplayPort+dp),
	}
	if cfg.KVEventsLayout == "map" {
		f.frames = 4
	}
	return f
}

func (f *follower) apply(payload []byte) {
	f.t.Helper()
	f.published = payload
	var b wire.KVBatch
	if err := b.Decode(payload); err != nil {
		f.t.Fatal(err)
	}
	if !b.HasRank || b.Rank != f.rank.DP || b.Malformed+b.Unknown > 0 || time.Since(time.UnixMicro(int64(b.Time*1e6))).Abs() > patience {
		f.t.Fatalf("batch %d of rank %d, %v, at %v, with %d malformed and %d unknown events", f.next, b.Rank, b.HasRank, b.Time, b.Malformed, b.Unknown)
	}
	f.normal.Each(&b, func(e *wire.KVEvent) {
		f.kinds[e.Kind]++
		switch e.Kind {
		case wire.KVStore:
			parent, has := e.Parent, e.HasParent
			for i, h := range e.Engine {
				c := cacheBlock{Engine: h, Local: e.Local[i]}
				if has {
					if _, ok := f.blocks[parent]; !ok {
						f.t.Errorf("block %d is stored after %d, which is not", h, parent)
					}
					c.Parent = new(parent)
				}
				if _, ok := f.blocks[h]; ok {
					f.t.Errorf("block %d is stored twice", h)
				}
				f.blocks[h] = c
				parent, has = h, true
			}
		case wire.KVRemove:
			for _, h := range e.Engine {
				if _, ok := f.blocks[h]; !ok {
					f.t.Errorf("block %d is removed and not there", h)
				}
				delete(f.blocks, h)
			}
		case wire.KVClear:
			clear(f.blocks)
		}
	})
	if f.normal.Counts != (wire.KVCounts{}) {
		f.t.Errorf("left out: %v", f.normal.Counts)
	}
	f.next++
}

// receive applies live batches up to number last. Those before the subscription are asked for.
func (f *follower) receive(last uint64) {
	f.t.Helper()
	for end := time.Now().Add(patience); f.next <= last; {
		if time.Now().After(end) {
			f.t.Fatalf("batch %d has not come, want %d", f.next, last)
		}
		m, err := f.sub.RecvMessageBytes(0)
		if err != nil {
			if zmq.AsErrno(err) != zmq.Errno(syscall.EAGAIN) {
				f.t.Fatal(err)
			}
			if f.live == 0 {
				f.ask(f.next)
			}
			continue
		}
		if len(m) != 3 || len(m[0]) > 0 || len(m[1]) != 8 {
			f.t.Fatalf("a message of %d frames: %x", len(m), m[:len(m)-1])
		}
		sequence := binary.BigEndian.Uint64(m[1])
		if sequence > f.next {
			f.ask(f.next)
		}
		if sequence < f.next {
			continue
		}
		f.live++
		f.apply(m[2])
	}
}

// ask applies a replay from a number on.
func (f *follower) ask(from uint64) (got []uint64) {
	f.t.Helper()
	if _, err := f.dealer.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		f.t.Fatal(err)
	}
	for end := time.Now().Add(patience); ; {
		m, err := f.dealer.RecvMessageBytes(0)
		if err != nil {
			if zmq.AsErrno(err) != zmq.Errno(syscall.EAGAIN) || time.Now().After(end) {
				f.t.Fatalf("replay from %d: %v", from, err)
			}
			continue
		}
		if len(m) != f.frames || len(m[0]) > 0 || f.frames == 4 && len(m[1]) > 0 {
			f.t.Fatalf("a reply of %d frames, want %d", len(m), f.frames)
		}
		sequence, payload := binary.BigEndian.Uint64(m[f.frames-2]), m[f.frames-1]
		if sequence == 1<<64-1 {
			if len(payload) > 0 {
				f.t.Errorf("an end with %d bytes", len(payload))
			}
			return got
		}
		got = append(got, sequence)
		if sequence == f.next {
			f.apply(payload)
		}
	}
}

// agree waits until all events have come, and compares the copy with the cache.
func (f *follower) agree(url, after string) cacheRank {
	f.t.Helper()
	var r cacheRank
	for {
		r = cacheOf(f.t, url).Workers[0].Ranks[f.rank.DP]
		if r.Sequence == nil {
			f.t.Fatalf("after %s: no event", after)
		}
		f.receive(*r.Sequence)
		if f.next == *r.Sequence+1 { // else a replay has brought more
			break
		}
	}
	if r.Dropped > 0 || int(r.DPRank) != int(f.rank.DP) {
		f.t.Errorf("after %s: rank %d, %d dropped", after, r.DPRank, r.Dropped)
	}
	if len(r.Blocks) != len(f.blocks) {
		f.t.Errorf("after %s: the cache has %d blocks, events tell of %d", after, len(r.Blocks), len(f.blocks))
	}
	for _, b := range r.Blocks {
		want, ok := f.blocks[b.Engine]
		if !ok || want.Local != b.Local || (want.Parent == nil) != (b.Parent == nil) || b.Parent != nil && *want.Parent != *b.Parent {
			f.t.Errorf("after %s: the cache has %+v, events tell of %+v", after, b, want)
		}
	}
	return r
}

// prompt asks rank dp to complete tokens, of which it makes a few more.
func promptRank(t *testing.T, url string, dp int, tokens []uint32, output int) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"prompt": tokens, "max_tokens": output})
	if err != nil {
		t.Fatal(err)
	}
	if code, data := post(t, url+"/v1/completions", string(body), "X-Data-Parallel-Rank", fmt.Sprint(dp)); code != http.StatusOK {
		t.Fatalf("%d %s", code, data)
	}
}

// someTokens are n token IDs that depend on seed.
func someTokens(seed, n int) []uint32 {
	r := rand.New(rand.NewPCG(uint64(seed), 1))
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = r.Uint32N(150_000)
	}
	return ids
}

// withEvents makes cfg publish on free ports.
func withEvents(t *testing.T, cfg sim.Config, layout string) sim.Config {
	n := cfg.Count * cfg.DPSize
	first := freePorts(t, 2*n)
	cfg.KVEventsPort, cfg.KVReplayPort, cfg.KVEventsLayout = first, first+n, layout
	return cfg
}

func TestKVEventsTellTheCache(t *testing.T) {
	for _, layout := range []string{"array", "map"} {
		for _, size := range []int{16, 64} {
			for _, dps := range []int{1, 2} {
				t.Run(fmt.Sprintf("%s, block size %d, %d ranks", layout, size, dps), func(t *testing.T) {
					t.Parallel()
					followCache(t, layout, size, dps)
				})
			}
		}
	}
}

func followCache(t *testing.T, layout string, size, dps int) {
	cfg := fast()
	cfg.BlockSize, cfg.DPSize, cfg.KVBlocks = size, dps, 32
	cfg = withEvents(t, cfg, layout)
	url := serve(t, cfg)[0]
	zctx := newContext(t)
	all := make([]*follower, dps)
	for dp := range all {
		all[dp] = newFollower(t, zctx, cfg, dp)
	}
	each := func(after string, check func(*follower, cacheRank)) {
		for _, f := range all {
			check(f, f.agree(url, after))
		}
	}
	// 5 blocks and a half, of which output makes 6 and a part.
	first := func(dp int) []uint32 { return someTokens(dp, 5*size+size/2) }
	for dp := range dps {
		promptRank(t, url, dp, first(dp), size)
	}
	each("store", func(f *follower, r cacheRank) {
		held := map[uint64]bool{}
		for _, b := range r.Blocks {
			held[b.Local] = true
		}
		for i, h := range kvhash.AppendBlocks(nil, first(int(f.rank.DP)), kvhash.Options{BlockSize: size}) {
			if !held[h] {
				t.Errorf("rank %d lacks block %d of its prompt", f.rank.DP, i)
			}
		}
		if len(r.Blocks) != 6 {
			t.Errorf("rank %d holds %d blocks, want 6", f.rank.DP, len(r.Blocks))
		}
	})
	for i := range 12 { // 48 blocks and more for 32
		for dp := range dps {
			promptRank(t, url, dp, someTokens(100+2*i+dp, 4*size+1), 3)
		}
	}
	each("evict", func(f *follower, r cacheRank) {
		if f.kinds[wire.KVRemove] == 0 || len(r.Blocks) > cfg.KVBlocks {
			t.Errorf("rank %d: %d removes, %d blocks", f.rank.DP, f.kinds[wire.KVRemove], len(r.Blocks))
		}
	})
	if code, data := post(t, url+"/reset_prefix_cache", ""); code != http.StatusOK || len(data) > 0 {
		t.Errorf("POST /reset_prefix_cache = %d %s", code, data)
	}
	each("clear", func(f *follower, r cacheRank) {
		if f.kinds[wire.KVClear] != 1 || len(r.Blocks) != 0 {
			t.Errorf("rank %d: %d clears, %d blocks", f.rank.DP, f.kinds[wire.KVClear], len(r.Blocks))
		}
	})
	for dp := range dps {
		promptRank(t, url, dp, first(dp), 1)
		promptRank(t, url, dp, append(first(dp), someTokens(50, size)...), 1) // goes on where the first ended
	}
	each("store after clear", func(f *follower, r cacheRank) {
		if len(r.Blocks) != 6 || f.live == 0 {
			t.Errorf("rank %d holds %d blocks, want 6; %d batches came live", f.rank.DP, len(r.Blocks), f.live)
		}
		if asMap := f.published[11]>>4 == 8; asMap != (layout == "map") { // after an array, a float and an array
			t.Errorf("an event begins with %x in layout %s", f.published[11], layout)
		}
		if got := f.ask(0); len(got) != int(f.next) || !slices.IsSorted(got) || got[0] != 0 {
			t.Errorf("a replay from 0 has %d batches, want %d from 0 on", len(got), f.next)
		}
		if got := f.ask(f.next - 2); len(got) != 2 || got[0] != f.next-2 {
			t.Errorf("a replay from %d: %v", f.next-2, got)
		}
		if got := f.ask(f.next + 5); len(got) != 0 {
			t.Errorf("a replay of nothing: %v", got)
		}
	})
}

// TestReplayOfWhatIsKept asks for more than the ring has, and in wrong ways.
func TestReplayOfWhatIsKept(t *testing.T) {
	cfg := fast()
	cfg.KVReplayBatches = 3
	cfg = withEvents(t, cfg, "map")
	url := serve(t, cfg)[0]
	f := newFollower(t, newContext(t), cfg, 0)
	for i := range 6 {
		promptRank(t, url, 0, someTokens(i, 20), 1)
	}
	last := *cacheOf(t, url).Workers[0].Ranks[0].Sequence
	for _, wrong := range [][]any{
		{[]byte{}}, {[]byte{}, []byte("1234567")}, {[]byte("x"), make([]byte, 8)}, {[]byte{}, make([]byte, 8), []byte{}}, {make([]byte, 8)},
	} {
		if _, err := f.dealer.SendMessage(wrong...); err != nil {
			t.Fatal(err)
		}
	}
	want := []uint64{last - 2, last - 1, last}
	for end := time.Now().Add(patience); ; { // the publisher may be behind GET /sim/cache
		got := f.ask(0)
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("a replay from 0: %v, want %v", got, want)
		}
	}
}

// TestResetWhileBusy: as in vLLM, what requests hold is not cleared.
func TestResetWhileBusy(t *testing.T) {
	cfg := withEvents(t, fast(), "array")
	cfg.Speed = 1
	url := serve(t, cfg)[0]
	f := newFollower(t, newContext(t), cfg, 0)
	promptRank(t, url, 0, someTokens(1, 40), 1)
	done := make(chan int, 1)
	go func() {
		code, _ := post(t, url+"/v1/completions", `{"prompt":"and so on","max_tokens":100}`)
		done <- code
	}()
	until(t, url, "running", func(s stats) bool { return s.Running == 1 })
	post(t, url+"/reset_prefix_cache", "")
	if r := f.agree(url, "a reset that does nothing"); len(r.Blocks) < 2 || f.kinds[wire.KVClear] != 0 {
		t.Errorf("%d blocks, %d clears", len(r.Blocks), f.kinds[wire.KVClear])
	}
	if code := <-done; code != http.StatusOK {
		t.Errorf("status %d", code)
	}
	post(t, url+"/reset_prefix_cache", "")
	if r := f.agree(url, "a reset"); len(r.Blocks) != 0 || f.kinds[wire.KVClear] != 1 {
		t.Errorf("%d blocks, %d clears", len(r.Blocks), f.kinds[wire.KVClear])
	}
}

// TestCacheWithoutEvents: the route works, and tells that there are none.
func TestCacheWithoutEvents(t *testing.T) {
	url := serve(t, fast())[0]
	promptRank(t, url, 0, someTokens(1, 40), 1)
	c := cacheOf(t, url)
	if r := c.Workers[0].Ranks[0]; r.Sequence != nil || len(r.Blocks) != 2 || c.BlockSize != 16 {
		t.Errorf("%+v", c)
	}
}

// TestKVPortTaken: a worker that can not publish does not start.
func TestKVPortTaken(t *testing.T) {
	for _, replay := range []bool{false, true} {
		cfg := withEvents(t, fast(), "array")
		port := cfg.KVEventsPort
		if replay {
			port = cfg.KVReplayPort
		}
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		s, err := sim.New(cfg, discard())
		if err != nil {
			t.Fatal(err)
		}
		lns, err := sim.Listen(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Run(t.Context(), lns); err == nil || !strings.Contains(err.Error(), fmt.Sprint(port)) {
			t.Errorf("Run = %v, want an error that names port %d", err, port)
		}
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFeedIsBounded: what finds no room is dropped, counted, and leaves a hole.
func TestFeedIsBounded(t *testing.T) {
	f := sim.NewFeed()
	f.Put(1<<20 + 1) // alone it fits, however large
	f.Put(1)
	f.Put(1)
	if got := f.Take(); !slices.Equal(got, []uint64{0}) {
		t.Errorf("batches %d wait, want the first alone", got)
	}
	f.Put(1 << 19)
	f.Put(1 << 19)
	f.Put(1)
	if got := f.Take(); !slices.Equal(got, []uint64{3, 4}) {
		t.Errorf("batches %d wait, want 3 and 4", got)
	}
	for range 1<<16 + 1 {
		f.Put(1)
	}
	if got := f.Take(); len(got) != 1<<16 || got[0] != 6 {
		t.Errorf("%d batches wait, want %d", len(got), 1<<16)
	}
	if last, dropped := f.Told(); last != 6+1<<16 || dropped != 4 {
		t.Errorf("last %d, dropped %d; want %d and 4", last, dropped, 6+1<<16)
	}
}

// TestSlowSubscriber: one that does not read loses batches, of which the first of a row is counted,
// and holds up nobody.
func TestSlowSubscriber(t *testing.T) {
	cfg := withEvents(t, fast(), "array")
	zctx := newContext(t)
	f := sim.NewFeed()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.PublishSlowly(ctx, zctx, cfg) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	deaf, err := zctx.NewSocket(zmq.SUB)
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	if err := errors.Join(deaf.SetLinger(0), deaf.SetRcvhwm(1), deaf.SetRcvbuf(4096), deaf.SetSubscribe(""),
		deaf.Connect(fmt.Sprintf("tcp://127.0.0.1:%d", cfg.KVEventsPort))); err != nil {
		t.Fatal(err)
	}
	hears := socket(t, zctx, zmq.SUB, cfg.KVEventsPort)
	receive := func() (sequence uint64, ok bool) {
		m, err := hears.RecvMessageBytes(0)
		if err != nil {
			return 0, false // nothing yet
		}
		if len(m) != 3 || len(m[1]) != 8 || len(m[2]) < 200_000 {
			t.Fatalf("a message of %d frames, of %d bytes", len(m), len(m[len(m)-1]))
		}
		return binary.BigEndian.Uint64(m[1]), true
	}
	put := func() (last, dropped uint64) {
		f.Put(200_000) // some 400 kB
		return f.Told()
	}
	end := time.Now().Add(patience)
	var heard, last uint64
	for i, ok := 0, false; !ok; i++ { // until it is connected
		if i%10 == 0 { // one a second, so that it can not be behind either when it is
			last, _ = put()
		}
		if heard, ok = receive(); !ok && time.Now().After(end) {
			t.Fatalf("nothing heard of %d batches", last+1)
		}
	}
	// From here on a batch is published when the one before has been heard, so that only the other
	// can be behind. What he loses is counted again if he has read meanwhile, which ends when all
	// buffers on the way to him are full.
	var dropped uint64
	for same := 0; same < 20 || dropped == 0; same++ {
		for heard < last {
			if next, ok := receive(); ok {
				if next != heard+1 {
					t.Fatalf("batch %d heard after %d", next, heard)
				}
				heard = next
			}
			if time.Now().After(end) {
				t.Fatalf("%d of %d batches heard, %d dropped, the last %d batches ago", heard+1, last+1, dropped, same)
			}
		}
		before := dropped
		if last, dropped = put(); dropped != before {
			same = 0
		}
	}
}
