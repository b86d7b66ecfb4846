package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"spillway/kvhash"
	"spillway/wire"
	"spillway/worker"
)

// heldBlock is a block that a rank has: what it is, and what it follows.
type heldBlock struct {
	Local  uint64  `json:"tokens_hash"`
	Engine uint64  `json:"block_hash"`
	Parent *uint64 `json:"parent_hash"`
}

func (b heldBlock) String() string {
	parent := "root"
	if b.Parent != nil {
		parent = strconv.FormatUint(*b.Parent, 16)
	}
	return fmt.Sprintf("%x after %s is %x", b.Engine, parent, b.Local)
}

// holdings are the blocks of each rank, sorted.
type holdings map[worker.Rank][]string

func (h holdings) add(r worker.Rank, b heldBlock) { h[r] = append(h[r], b.String()) }

func (h holdings) sorted() holdings {
	for r := range h {
		slices.Sort(h[r])
	}
	return h
}

func (h holdings) equal(o holdings) bool { return maps.EqualFunc(h, o, slices.Equal[[]string]) }

func (h holdings) blocks() (n int) {
	for _, blocks := range h {
		n += len(blocks)
	}
	return n
}

// simulated is a process of spillway sim that publishes KV events. Its worker i is instance i+1.
type simulated struct {
	*running
	url   string // of the first worker
	urls  []string
	args  []string
	block int
	dp    int
	count int
	base  int // port of the first publisher; replays come from one count*dp further, and requests go to one 2*count*dp further
	id    func(i int) worker.ID
}

func startSimulated(t *testing.T, count, dp, block int, more ...string) *simulated {
	t.Helper()
	s := &simulated{dp: dp, block: block, count: count, base: freePorts(t, 2*count*dp+count), id: func(i int) worker.ID { return worker.ID(i + 1) }}
	s.args = append([]string{"sim", "--port", strconv.Itoa(s.base + 2*count*dp), "--count", strconv.Itoa(count), "--dp-size", strconv.Itoa(dp), "--block-size", strconv.Itoa(block),
		"--kv-events-port", strconv.Itoa(s.base), "--kv-replay-port", strconv.Itoa(s.base + count*dp), "--speed", "50"}, more...)
	s.running = &running{t: t}
	s.begin()
	return s
}

// kill ends the process.
func (s *simulated) kill() {
	s.t.Helper()
	s.signal(syscall.SIGKILL)
	s.exit()
}

// begin starts the process, in place of one that has ended.
func (s *simulated) begin() {
	s.t.Helper()
	s.running = start(s.t, nil, s.args...)
	s.urls = strings.Split(s.await(`--workers: (\S+)\n`), ",")
	s.url = s.urls[0]
}

// ports are those of a rank of worker i, from 0: of its KV events, and of replays of them.
func (s *simulated) ports(i, dp int) (events, replay int) {
	events = s.base + i*s.dp + dp
	return events, events + s.count*s.dp
}

// freePorts finds n ports in a row that nobody listens on.
func freePorts(t *testing.T, n int) int {
	t.Helper()
search:
	for base := 21000 + os.Getpid()%8000; base < 32000; base += n {
		for p := base; p < base+n; p++ {
			if !free(t, p) {
				continue search
			}
		}
		return base
	}
	t.Fatal("no free ports")
	return 0
}

// prompt is text that begins like others of the same kind.
func prompt(kind, n, words int) string {
	return strings.Repeat(fmt.Sprintf("kind %d ", kind), words) + strings.Repeat(fmt.Sprintf("number %d ", n), words)
}

// send has a rank of the first worker answer a prompt.
func (s *simulated) send(dp int, prompt string) { s.complete(0, dp, prompt) }

// complete has a rank of worker i, from 0, answer a prompt: text, or tokens.
func (s *simulated) complete(i, dp int, prompt any) {
	s.t.Helper()
	body, err := json.Marshal(map[string]any{"model": "sim-model", "prompt": prompt, "max_tokens": 4})
	if err != nil {
		s.t.Fatal(err)
	}
	req, err := http.NewRequest("POST", s.urls[i]+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(dp))
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	text, err := io.ReadAll(res.Body)
	if _ = res.Body.Close(); err != nil || res.StatusCode != 200 {
		s.t.Fatalf("a completion is answered %d %s, %v", res.StatusCode, text, err)
	}
}

// tokens are those that workers make of a prompt.
func (s *simulated) tokens(prompt string) []uint32 {
	s.t.Helper()
	res, err := http.Post(s.url+"/tokenize", "application/json", strings.NewReader(fmt.Sprintf(`{"model":"sim-model","prompt":%q}`, prompt)))
	if err != nil {
		s.t.Fatal(err)
	}
	var made struct{ Tokens []uint32 }
	err = json.NewDecoder(res.Body).Decode(&made)
	if _ = res.Body.Close(); err != nil || len(made.Tokens) == 0 {
		s.t.Fatalf("/tokenize: %v", err)
	}
	return made.Tokens
}

// clear empties the first worker's cache.
func (s *simulated) clear() {
	s.t.Helper()
	s.reset(s.url)
}

// empty empties all caches.
func (s *simulated) empty() {
	s.t.Helper()
	for _, url := range s.urls {
		s.reset(url)
	}
}

func (s *simulated) reset(url string) {
	s.t.Helper()
	res, err := http.Post(url+"/reset_prefix_cache", "", nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if _ = res.Body.Close(); res.StatusCode != 200 {
		s.t.Fatalf("/reset_prefix_cache is answered %d", res.StatusCode)
	}
}

// cache is what all ranks hold, and the number of the last batch of each that has sent any.
func (s *simulated) cache() (holdings, map[worker.Rank]uint64) {
	s.t.Helper()
	return cacheOf(s.t, s.url, s.id)
}

// cacheOf is cache for the workers of the process at url, whose IDs go by their places in it.
func cacheOf(t *testing.T, url string, id func(i int) worker.ID) (holdings, map[worker.Rank]uint64) {
	t.Helper()
	var all struct {
		Workers []struct {
			Worker int
			Ranks  []struct {
				DPRank   uint32 `json:"dp_rank"`
				Sequence *uint64
				Blocks   []heldBlock
			}
		}
	}
	status, text := fetch(t, url+"/sim/cache")
	if err := json.Unmarshal([]byte(text), &all); err != nil || status != 200 {
		t.Fatalf("GET /sim/cache = %d %s, %v", status, text, err)
	}
	h, last := holdings{}, map[worker.Rank]uint64{}
	for _, w := range all.Workers {
		for _, r := range w.Ranks {
			rank := worker.Rank{Worker: id(w.Worker), DP: r.DPRank}
			for _, b := range r.Blocks {
				h.add(rank, b)
			}
			if r.Sequence != nil {
				last[rank] = *r.Sequence
			}
		}
	}
	return h.sorted(), last
}

// indexer is a process of spillway indexer.
type indexer struct {
	*running
	url string
}

func startIndexer(t *testing.T, args ...string) indexer {
	t.Helper()
	p := start(t, nil, append([]string{"indexer", "--host", "127.0.0.1", "--port", "0"}, args...)...)
	return indexer{p, p.await(`Indexer: (\S+)\n`)}
}

func (x indexer) post(path, body string, want int) string {
	x.t.Helper()
	got, text := slotTracker(x).post(path, body)
	if got != want {
		x.t.Fatalf("POST %s %s = %d %s, want %d", path, body, got, text, want)
	}
	return text
}

// register has the indexer listen to all ranks of a sim.
func (x indexer) register(s *simulated, replay bool) {
	x.t.Helper()
	for i := range s.count * s.dp {
		more := ""
		if replay {
			more = fmt.Sprintf(`,"replay_endpoint":"tcp://127.0.0.1:%d"`, s.base+s.count*s.dp+i)
		}
		x.post("/register", fmt.Sprintf(`{"instance_id":%d,"dp_rank":%d,"endpoint":"tcp://127.0.0.1:%d","model_name":"m","block_size":%d%s}`,
			1+i/s.dp, i%s.dp, s.base+i, s.block, more), 201)
	}
}

func (x indexer) unregister(s *simulated) {
	x.t.Helper()
	for i := range s.count {
		x.post("/unregister", fmt.Sprintf(`{"instance_id":%d,"model_name":"m"}`, i+1), 200)
	}
}

// listed is what /workers tells of a listener.
type listed struct {
	Status   string
	Degraded bool
	Applied  *uint64
}

func (x indexer) listeners() map[worker.Rank]listed {
	x.t.Helper()
	var all []struct {
		ID        worker.ID `json:"instance_id"`
		Listeners map[string]listed
	}
	if _, text := fetch(x.t, x.url+"/workers"); json.Unmarshal([]byte(text), &all) != nil {
		x.t.Fatalf("GET /workers = %s", text)
	}
	by := map[worker.Rank]listed{}
	for _, w := range all {
		for dp, l := range w.Listeners {
			n, err := strconv.ParseUint(dp, 10, 32)
			if err != nil {
				x.t.Fatal(err)
			}
			by[worker.Rank{Worker: w.ID, DP: uint32(n)}] = l
		}
	}
	return by
}

// active waits until all listeners are connected, and their subscriptions have had the time to
// arrive, which nothing tells of.
func (x indexer) active(s *simulated) {
	x.t.Helper()
	eventually(x.t, "all listeners are active", func() bool {
		n := 0
		for _, l := range x.listeners() {
			if l.Status == "active" {
				n++
			}
		}
		return n == s.count*s.dp
	})
}

// dump is what the index holds.
func (x indexer) dump() holdings {
	x.t.Helper()
	_, text := fetch(x.t, x.url+"/dump")
	return readDump(x.t, text)
}

func readDump(t *testing.T, text string) holdings {
	t.Helper()
	h := holdings{}
	_, err := wire.ReadDump(strings.NewReader(text), func(wire.DumpEntry) bool { return true }, func(e *wire.KVEvent) {
		parent := &e.Parent
		if !e.HasParent {
			parent = nil
		}
		for i, engine := range e.Engine {
			b := heldBlock{e.Local[i], engine, nil}
			if parent != nil {
				b.Parent = new(*parent)
			}
			h.add(e.Rank, b)
			parent = &engine
		}
	})
	if err != nil {
		t.Fatalf("dump: %v", err)
	}
	return h.sorted()
}

// metric is the value of a series of /metrics, given as it is written there.
func (x indexer) metric(series string) float64 {
	x.t.Helper()
	_, page := fetch(x.t, x.url+"/metrics")
	return valueOn(x.t, page, series)
}

// hears sends until the indexer has heard of all ranks since this call. What a publisher sends
// before a subscription has arrived is lost, and nothing tells of it but the next batch.
func (x indexer) hears(s *simulated) {
	x.t.Helper()
	before, n := x.listeners(), 0
	eventually(x.t, "all ranks are heard", func() bool {
		n++
		for i := range s.count * s.dp {
			r := worker.Rank{Worker: worker.ID(1 + i/s.dp), DP: uint32(i % s.dp)}
			was, is := before[r].Applied, x.listeners()[r].Applied
			if is != nil && (was == nil || *is != *was) {
				continue
			}
			if i < s.dp {
				s.send(i, prompt(100+i, n, s.block))
			}
			return false
		}
		return true
	})
}

// agrees waits until the indexer has applied the last batch of each rank, and compares the index
// with the caches, block by block.
func (x indexer) agrees(s *simulated, when string) {
	x.t.Helper()
	eventually(x.t, when+": all batches are applied", func() bool {
		_, last := s.cache()
		all := x.listeners()
		for r, n := range last {
			if a := all[r].Applied; a == nil || *a != n {
				return false
			}
		}
		return true
	})
	want, _ := s.cache()
	if got := x.dump(); !got.equal(want) {
		x.t.Errorf("%s: the index holds %v\nwant %v", when, got, want)
	}
	if got := x.metric(`spillway_kv_index_entries{model="m",tenant="default"}`); int(got) != want.blocks() {
		x.t.Errorf("%s: %v entries, want %d", when, got, want.blocks())
	}
}

// answersLike compares /query for a prompt with what the caches hold of it.
func (x indexer) answersLike(s *simulated, prompt string) {
	x.t.Helper()
	tokens := s.tokens(prompt)
	cache, _ := s.cache()
	want := map[string]map[string]int{}
	for r, blocks := range cache {
		n, parent := 0, "root"
		for _, local := range kvhash.AppendBlocks(nil, tokens, kvhash.Options{BlockSize: s.block}) {
			at := slices.IndexFunc(blocks, func(b string) bool { return strings.HasSuffix(b, fmt.Sprintf(" after %s is %x", parent, local)) })
			if at < 0 {
				break
			}
			parent, _, _ = strings.Cut(blocks[at], " ")
			n++
		}
		if n > 0 {
			id, dp := r.Worker.String(), strconv.FormatUint(uint64(r.DP), 10)
			if want[id] == nil {
				want[id] = map[string]int{}
			}
			want[id][dp] = n * s.block
		}
	}
	query, err := json.Marshal(map[string]any{"model_name": "m", "token_ids": tokens})
	if err != nil {
		x.t.Fatal(err)
	}
	var got struct{ Scores map[string]map[string]int }
	if text := x.post("/query", string(query), 200); json.Unmarshal([]byte(text), &got) != nil {
		x.t.Fatalf("/query = %s", text)
	}
	if !maps.EqualFunc(got.Scores, want, maps.Equal[map[string]int]) {
		x.t.Errorf("/query of %.40q = %v, want %v", prompt, got.Scores, want)
	}
}

// TestIndexerFollows compares the index with the caches after stores, evictions, clears and
// restarts of the engine.
func TestIndexerFollows(t *testing.T) {
	for _, tt := range []struct {
		layout    string
		dp, block int
	}{{"array", 1, 16}, {"map", 2, 64}, {"array", 2, 64}, {"map", 1, 16}} {
		t.Run(fmt.Sprintf("%s, dp %d, block %d", tt.layout, tt.dp, tt.block), func(t *testing.T) {
			x := startIndexer(t)
			words := 3 * tt.block
			s := startSimulated(t, 1, tt.dp, tt.block, "--kv-events-layout", tt.layout, "--kv-blocks", "60")
			x.register(s, true)
			x.hears(s)
			round := func(from, to int) {
				for n := from; n < to; n++ {
					for dp := range tt.dp {
						s.send(dp, prompt(n%3, n+dp, words))
					}
				}
			}
			round(0, 3)
			x.agrees(s, "after stores")
			if cache, _ := s.cache(); cache.blocks() == 0 {
				t.Fatal("nothing was stored")
			}
			x.answersLike(s, prompt(1, 1, words))
			x.answersLike(s, prompt(1, 99, words))
			x.answersLike(s, "something else")
			round(3, 15)
			x.agrees(s, "after evictions")
			if n := x.metric(`spillway_kv_events_total{event_type="removed",status="ok"}`); n == 0 {
				t.Error("nothing was evicted")
			}
			x.answersLike(s, prompt(2, 14, words))
			s.clear()
			x.agrees(s, "after a clear")
			if n := x.metric(`spillway_kv_events_total{event_type="cleared",status="ok"}`); n != float64(tt.dp) || x.dump().blocks() != 0 {
				t.Errorf("%v clears, want %d, and %d blocks, want none", n, tt.dp, x.dump().blocks())
			}
			round(20, 23)
			x.agrees(s, "after stores that follow a clear")
			s.kill()
			s.begin()
			x.hears(s)
			if n := x.metric("spillway_kv_restarts_total"); n != float64(tt.dp) {
				t.Errorf("%v restarts are seen, want %d", n, tt.dp)
			}
			round(31, 33)
			x.agrees(s, "after a restart of the engine")
			x.answersLike(s, prompt(1, 31, words))
			x.unregister(s)
			if text := x.post("/query", `{"model_name":"m","token_ids":[1]}`, 404); !strings.Contains(text, "m") {
				t.Errorf("/query after all has gone: %s", text)
			}
			x.register(s, true) // begins at 0, and has all replayed
			x.hears(s)
			round(40, 42)
			x.agrees(s, "after a restart of the listener")
			for r, l := range x.listeners() {
				if l.Degraded {
					t.Errorf("rank %v is degraded, though nothing was lost", r)
				}
			}
		})
	}
}

// TestIndexerBeforeEngine registers a worker that is not there yet, with a replay endpoint where
// nobody ever answers. What it publishes before the subscription arrives is lost, so it is cleared
// when it is heard; from then on the index is what the worker holds.
func TestIndexerBeforeEngine(t *testing.T) {
	x := startIndexer(t)
	probe := startSimulated(t, 1, 1, 16)
	base := probe.base
	probe.kill()
	x.post("/register", fmt.Sprintf(`{"instance_id":1,"endpoint":"tcp://127.0.0.1:%d","replay_endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16}`, base), 201)
	if l := x.listeners()[worker.Rank{Worker: 1}]; l.Status != "pending" {
		t.Errorf("the listener of an engine that is not there is %s, want pending", l.Status)
	}
	probe.begin()
	x.active(probe)
	x.hears(probe)
	probe.clear()
	x.agrees(probe, "after a clear")
	for n := range 3 {
		probe.send(0, prompt(n%2, n, 20))
	}
	x.agrees(probe, "after stores")
	if cache, _ := probe.cache(); cache.blocks() == 0 {
		t.Error("nothing was stored")
	}
	for _, path := range []string{"/health", "/ready"} {
		if status, _ := fetch(t, x.url+path); status != 200 {
			t.Errorf("%s = %d, want 200", path, status)
		}
	}
}

// TestIndexerTrace replays a trace with shared prefixes through two workers of two ranks.
func TestIndexerTrace(t *testing.T) {
	x := startIndexer(t)
	s := startSimulated(t, 2, 2, 16, "--kv-blocks", "600", "--max-num-seqs", "8")
	x.register(s, true)
	x.active(s)
	var trace bytes.Buffer
	for i := range 60 {
		fmt.Fprintf(&trace, `{"timestamp":%d,"input_length":1536,"output_length":24,"hash_ids":[%d,%d,%d]}`+"\n", 50*i, i%3, 10+i%7, 100+i)
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	urls := strings.Split(s.await(`--workers: (\S+)\n`), ",")
	var all []*running
	for _, url := range urls {
		all = append(all, start(t, nil, "replay", "--trace", file, "--url", url, "--seed", strconv.Itoa(len(all))))
	}
	for _, r := range all {
		if code := r.exit(); code != 0 {
			t.Fatalf("replay ends with %d", code)
		}
	}
	x.agrees(s, "after a trace")
	if n := x.metric(`spillway_kv_events_total{event_type="removed",status="ok"}`); n == 0 {
		t.Error("nothing was evicted, which makes the test an easy one")
	}
	for _, series := range []string{"spillway_kv_gap_batches_lost_total", `spillway_kv_events_total{event_type="stored",status="parent_block_not_found"}`, `spillway_kv_events_total{event_type="removed",status="block_not_found"}`} {
		if n := x.metric(series); n != 0 {
			t.Errorf("%s = %v, want 0", series, n)
		}
	}
}

// TestIndexersRecover starts a second indexer under live traffic. It has nobody to replay what it
// has not heard, so that all it knows of the past is from the first.
func TestIndexersRecover(t *testing.T) {
	a := startIndexer(t)
	s := startSimulated(t, 1, 2, 16, "--kv-blocks", "400")
	a.register(s, true)
	a.hears(s)
	n := 0
	round := func() {
		for dp := range s.dp {
			s.send(dp, prompt(n%5, n, 60))
		}
		n++
	}
	for range 10 {
		round()
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				round()
			}
		}
	}()
	b := startIndexer(t, "--peers", "http://127.0.0.1:1,"+a.url, "--model-name", "m", "--block-size", "16",
		"--workers", fmt.Sprintf("1=tcp://127.0.0.1:%d,1:1=tcp://127.0.0.1:%d", s.base, s.base+1))
	if status, _ := fetch(t, b.url+"/health"); status != 200 {
		t.Errorf("/health during recovery = %d, want 200", status)
	}
	eventually(t, "b is ready", func() bool { status, _ := fetch(t, b.url+"/ready"); return status == 200 })
	eventually(t, "b hears of what goes on", func() bool {
		all := b.listeners()
		return all[worker.Rank{Worker: 1}].Applied != nil && all[worker.Rank{Worker: 1, DP: 1}].Applied != nil
	})
	close(stop)
	<-stopped
	round()
	a.agrees(s, "the first")
	b.agrees(s, "the second, which came late")
	if n := b.metric("spillway_kv_gap_batches_lost_total"); n == 0 {
		t.Error("nothing was lost to the second, so it has shown nothing")
	}
	if _, peers := fetch(t, b.url+"/peers"); peers != `["http://127.0.0.1:1","`+a.url+`"]` {
		t.Errorf("peers = %s", peers)
	}
}
