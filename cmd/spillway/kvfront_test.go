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
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/kvindex/service"
	"spillway/worker"
)

// kvFront is a front end in mode kv, in this process, over simulated workers in another one.
type kvFront struct {
	*fleet
	sims  *simulated
	front *frontend
	admin string
	sent  int // prompts of hears, of which no two begin alike
}

// startKVFront runs one until the test ends. Where its workers publish KV events is told as at a
// terminal, if it is told.
func startKVFront(t *testing.T, s *simulated, events bool, more ...string) *kvFront {
	t.Helper()
	before := goleak.IgnoreCurrent()
	f := &kvFront{fleet: &fleet{t: t, sim: s.url, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}, sims: s}
	t.Cleanup(func() {
		f.http.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
		goleak.VerifyNone(t, before)
	})
	s.id = func(i int) worker.ID { return worker.DefaultID(s.urls[i]) }
	args := []string{
		"--workers", strings.Join(s.urls, ","), "--dp-size", strconv.Itoa(s.dp), "--router-mode", "kv",
		"--http-host", "127.0.0.1", "--http-port", "0", "--admin-addr", "127.0.0.1:0", "--scrape-interval", "50ms",
	}
	if events {
		args = append(args, "--kv-events-port", strconv.Itoa(s.base), "--kv-replay-port", strconv.Itoa(s.base+s.count*s.dp))
	}
	front, d, _ := serveFrontend(t, append(args, more...)...)
	f.front, f.url, f.admin = front, d.url(), d.adminURL()
	f.ready(s.count)
	return f
}

// ready waits until requests may go to so many workers, and these have told how large their blocks are.
func (f *kvFront) ready(workers int) {
	f.t.Helper()
	want := fmt.Sprintf(`"registered":%d,"routable":%[1]d,`, workers)
	eventually(f.t, "all workers may be sent to", func() bool {
		_, ready := fetch(f.t, f.url+"/v1/models/sim-model/ready")
		return strings.Contains(ready, want) && strings.Count(ready, `"kv_total_blocks"`) == workers*f.sims.dp
	})
}

// value is that of a series, given as it is written.
func (f *kvFront) value(series string) float64 {
	f.t.Helper()
	_, page := fetch(f.t, f.admin+"/metrics")
	return valueOn(f.t, page, series)
}

// heldBy is what the index of a front end holds.
func heldBy(t *testing.T, f *frontend) holdings {
	t.Helper()
	var dump bytes.Buffer
	if err := service.WriteDump(&dump, f.index.All()); err != nil {
		t.Fatal(err)
	}
	return readDump(t, dump.String())
}

// follows waits until a front end has applied the last batch of each rank that caches tells of, and its index is
// equal to them, block by block.
func follows(t *testing.T, f *frontend, when string, caches func() (holdings, map[worker.Rank]uint64)) holdings {
	t.Helper()
	var want, got holdings
	var last, applied map[worker.Rank]uint64
	agree := false
	defer func() {
		if !agree {
			t.Errorf("%s: the index holds %d blocks of %d ranks, the caches %d of %d:\n%v\nwant %v\nthe last batches applied are %v, want %v",
				when, got.blocks(), len(got), want.blocks(), len(want), got, want, applied, last)
		}
	}()
	eventually(t, when+": the index is equal to the caches", func() bool {
		want, last = caches()
		applied = map[worker.Rank]uint64{}
		for _, l := range f.caches.Statuses() {
			if l.Applied != nil {
				applied[l.Rank] = *l.Applied
			}
		}
		got = heldBy(t, f)
		agree = maps.Equal(applied, last) && got.equal(want)
		return agree
	})
	return want
}

// agrees compares the index with the caches, of which all ranks must have told something.
func (f *kvFront) agrees(when string) {
	f.t.Helper()
	want := follows(f.t, f.front, when, f.sims.cache)
	if len(want) < f.sims.count*f.sims.dp {
		f.t.Errorf("%s: only %d ranks have anything, which makes the test an easy one", when, len(want))
	}
}

// placed is where a request went, and what was cached of it there, in tokens.
type placed struct {
	worker, rank string
	cached       int
}

// complete sends a prompt, text or tokens, with headers by name and value.
func (f *kvFront) complete(prompt any, header ...string) placed {
	f.t.Helper()
	body, err := json.Marshal(map[string]any{"model": "sim-model", "prompt": prompt, "max_tokens": 2})
	if err != nil {
		f.t.Error(err)
		return placed{}
	}
	resp, err := f.send(body, header...)
	if err != nil {
		f.t.Error(err)
		return placed{}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	var answer struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err != nil || resp.StatusCode != 200 || json.Unmarshal(text, &answer) != nil {
		f.t.Errorf("a completion is answered %d %s, %v", resp.StatusCode, text, err)
	}
	return placed{resp.Header.Get("X-Spillway-Worker"), resp.Header.Get("X-Spillway-Dp-Rank"), answer.Usage.Details.Cached}
}

func (f *kvFront) send(body []byte, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodPost, f.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return f.http.Do(req)
}

// hears has ranks compute prompts of their own until something has been heard of each since this call. What a
// publisher sends before a subscription has arrived is lost, and nothing tells of it but the next batch.
func (f *kvFront) hears() {
	f.t.Helper()
	applied := func() map[worker.Rank]uint64 {
		all := map[worker.Rank]uint64{}
		for _, l := range f.front.caches.Statuses() {
			if l.Applied != nil {
				all[l.Rank] = *l.Applied
			}
		}
		return all
	}
	before, n := applied(), 0
	var asked worker.Rank
	var at time.Time
	eventually(f.t, "all ranks are heard", func() bool {
		for i := range f.sims.count {
			for dp := range f.sims.dp {
				r := worker.Rank{Worker: f.sims.id(i), DP: uint32(dp)}
				was, known := before[r]
				if is, heard := applied()[r]; heard && (!known || is != was) {
					continue
				}
				if r == asked && time.Since(at) < time.Second { // no more than an engine can tell of again
					return false
				}
				n++
				f.sent++
				asked, at = r, time.Now()
				pin := []string{"X-Worker-Instance-Id", r.Worker.String(), "X-Dp-Rank", strconv.Itoa(dp)}
				if got := f.complete(prompt(1000+f.sent, n, 10), pin...); f.sims.dp > 1 && got.rank != strconv.Itoa(dp) {
					f.t.Errorf("a request pinned to rank %d went to %q", dp, got.rank)
				}
				return false
			}
		}
		return true
	})
}

// replay sends a trace in which prefixes come again, and waits for its end.
func (f *kvFront) replay(seed int) {
	f.t.Helper()
	var trace bytes.Buffer
	for i := range 60 {
		fmt.Fprintf(&trace, `{"timestamp":%d,"input_length":1536,"output_length":24,"hash_ids":[%d,%d,%d]}`+"\n", 20*i, i%3, 10+i%7, 100*seed+i)
	}
	file := filepath.Join(f.t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		f.t.Fatal(err)
	}
	r := start(f.t, nil, "replay", "--trace", file, "--url", f.url, "--seed", strconv.Itoa(seed))
	if code := r.exit(); code != 0 {
		f.t.Fatalf("replay ends with %d", code)
	}
}

// ranksOf counts the ranks in the index that a worker has.
func (f *kvFront) ranksOf(id worker.ID) (n int) {
	f.t.Helper()
	for r := range heldBy(f.t, f.front) {
		if r.Worker == id {
			n++
		}
	}
	return n
}

// TestFrontendFollowsCaches has a front end hear what its workers have cached: of some that ran before, that
// go and come back, and that begin anew.
func TestFrontendFollowsCaches(t *testing.T) {
	for _, dp := range []int{1, 4} {
		t.Run(fmt.Sprintf("dp %d", dp), func(t *testing.T) {
			s := startSimulated(t, 2, dp, 16, "--kv-blocks", "400", "--max-num-seqs", "8")
			s.send(0, prompt(1, 1, 64)) // before anybody listens
			f := startKVFront(t, s, true)
			f.replay(1)
			f.hears()
			f.agrees("after a trace")
			for _, series := range []string{"spillway_kv_gap_batches_lost_total", `spillway_kv_events_total{event_type="stored",status="parent_block_not_found"}`, `spillway_kv_events_total{event_type="removed",status="block_not_found"}`} {
				if n := f.value(series); n != 0 {
					t.Errorf("%s = %v, want 0", series, n)
				}
			}
			if n := f.value(`spillway_kv_events_total{event_type="removed",status="ok"}`); n == 0 {
				t.Error("nothing was evicted, which makes the test an easy one")
			}
			f.findsCached()

			first := s.id(0)
			status, record := ask(t, "GET", f.admin+"/workers/"+first.String(), "")
			if status != 200 || !strings.Contains(record, `"kv_events_endpoints":{"0":"tcp://127.0.0.1:`) {
				t.Fatalf("GET /workers = %d %s, want where it publishes", status, record)
			}
			if status, body := ask(t, "PATCH", f.admin+"/workers/"+first.String(), `{"max_concurrency":77}`); status != 200 {
				t.Fatalf("PATCH /workers = %d %s", status, body)
			}
			f.agrees("after a change that does not concern it")
			if status, body := ask(t, "DELETE", f.admin+"/workers/"+first.String(), ""); status != 200 {
				t.Fatalf("DELETE /workers = %d %s", status, body)
			}
			if n := f.ranksOf(first); n != 0 {
				t.Errorf("%d ranks of a removed worker are in the index", n)
			}
			if n := len(f.front.caches.Statuses()); n != dp {
				t.Errorf("%d ranks are listened to, want the %d that are left", n, dp)
			}
			if status, body := ask(t, "POST", f.admin+"/workers", record); status != 201 {
				t.Fatalf("POST /workers = %d %s", status, body)
			}
			f.ready(2)
			f.hears()
			f.agrees("after the worker has come back")

			for again := range 3 { // the second and third time they soon have counted further than before
				s.kill()
				s.begin()
				for n := range 5 * (again + 1) {
					for i := range 2 * dp {
						s.complete(i/dp, i%dp, prompt(2000+again, n, 5))
					}
				}
				f.ready(2)
				f.agrees("after the engines have begun anew")
				if n := f.value("spillway_kv_restarts_total"); n != float64((again+1)*2*dp) {
					t.Errorf("%v restarts are seen, want %d", n, (again+1)*2*dp)
				}
			}
			f.replay(2)
			f.agrees("after another trace")
			f.findsCached()
		})
	}
}

// findsCached sends prompts twice: the second time they must go where they are.
func (f *kvFront) findsCached() {
	f.t.Helper()
	for n := range 8 {
		tokens := f.sims.tokens(prompt(50+n, n, 40))
		first := f.complete(tokens)
		f.agrees("after a prompt")
		again := f.complete(tokens)
		if again.worker != first.worker || again.rank != first.rank || again.cached < len(tokens)-f.sims.block {
			f.t.Errorf("a prompt of %d tokens went to %+v and then to %+v; want the same rank, and all complete blocks cached", len(tokens), first, again)
		}
	}
}

// TestFrontendWithoutEvents has a front end conclude what is cached from where it has sent it.
func TestFrontendWithoutEvents(t *testing.T) {
	s := startSimulated(t, 4, 1, 16)
	f := startKVFront(t, s, false)
	used := map[string]bool{}
	for n := range 12 {
		text := prompt(n, n, 40)
		for _, p := range []any{f.sims.tokens(text), "said " + text} {
			first := f.complete(p)
			again := f.complete(p)
			used[first.worker] = true
			if again.worker != first.worker || again.cached == 0 {
				t.Errorf("a prompt (%T) went to %+v and then to %+v; want the same worker, and most of it cached", p, first, again)
			}
		}
	}
	if len(used) < 3 {
		t.Errorf("12 prompts without anything in common all went to %v", used)
	}
	listens := func(when string, want int) {
		t.Helper()
		if n := len(f.front.caches.Statuses()); n != want {
			t.Errorf("%s %d ranks are listened to, want %d", when, n, want)
		}
	}
	listens("while no worker names an endpoint", 0)
	named := func(i int) string { return fmt.Sprintf(`{"kv_events_endpoint":"tcp://127.0.0.1:%d"}`, s.base+i) }
	for i := range s.count - 1 {
		if status, body := ask(t, "PATCH", f.admin+"/workers/"+s.id(i).String(), named(i)); status != 200 || !strings.Contains(body, "schedulable") {
			t.Fatalf("PATCH /workers = %d %s", status, body)
		}
	}
	listens("while one names none", 0)
	last := s.id(s.count - 1)
	const entries = `spillway_kv_index_entries{model="sim-model",tenant="default"}`
	if f.value(entries) == 0 {
		t.Error("no decision is remembered while one worker does not publish")
	}
	if status, body := ask(t, "DELETE", f.admin+"/workers/"+last.String(), ""); status != 200 {
		t.Fatalf("DELETE /workers = %d %s", status, body)
	}
	listens("when that one has gone", s.count-1)
	if n := f.value(entries); n != 0 {
		t.Errorf("%v blocks are taken to be cached because of decisions, though all workers publish now", n)
	}
}

// rankStats is what a simulated rank tells of itself.
type rankStats struct {
	DP       uint32 `json:"dp_rank"`
	Running  int    `json:"running"`
	Finished int    `json:"finished_requests"`
}

func (f *kvFront) rankStats() (all []rankStats) {
	f.t.Helper()
	_, text := fetch(f.t, f.sims.url+"/sim/stats")
	for _, w := range read[struct{ Workers []struct{ Ranks []rankStats } }](f.t, text).Workers {
		all = append(all, w.Ranks...)
	}
	return all
}

// TestFrontendRanks has requests spread over the ranks of a worker, which is told each time which of them it
// is: what ranks have served, what is booked on them and what they have cached agree.
func TestFrontendRanks(t *testing.T) {
	const ranks, each = 4, 4
	s := startSimulated(t, 1, ranks, 16, "--speed", "1", "--prefill-tokens-per-second", "1000000")
	f := startKVFront(t, s, true)
	name := strings.TrimPrefix(s.url, "http://")
	var streams []*http.Response
	for n := range ranks * each {
		body := fmt.Sprintf(`{"model":"sim-model","prompt":%q,"max_tokens":3000,"ignore_eos":true,"stream":true}`, prompt(n, n, 100))
		resp, err := f.send([]byte(body), "X-Data-Parallel-Rank", "no number") // of which nothing may reach the worker
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil || resp.StatusCode != 200 {
			t.Fatalf("a stream: %s, %v", resp.Status, err)
		}
		streams = append(streams, resp)
	}
	given := map[string]int{}
	for _, resp := range streams {
		given[resp.Header.Get("X-Spillway-Dp-Rank")]++
	}
	for _, r := range f.rankStats() {
		dp := strconv.FormatUint(uint64(r.DP), 10)
		booked := f.value(fmt.Sprintf(`spillway_slots_inflight{dp_rank=%q,worker=%q}`, dp, name))
		if r.Running != each || given[dp] != each || booked != each {
			t.Errorf("rank %s runs %d streams, %d went there and %v are booked; want %d", dp, r.Running, given[dp], booked, each)
		}
	}
	for _, resp := range streams {
		_ = resp.Body.Close()
	}
	eventually(t, "no rank has anything to do", func() bool {
		for _, r := range f.rankStats() {
			if r.Running > 0 {
				return false
			}
		}
		return true
	})

	before := f.rankStats()
	var mu sync.Mutex
	var clients sync.WaitGroup
	clear(given)
	for c := range 8 {
		clients.Go(func() {
			for n := range 10 {
				got := f.complete(prompt(c, n, 20))
				mu.Lock()
				given[got.rank]++
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	for i, r := range f.rankStats() {
		dp := strconv.FormatUint(uint64(r.DP), 10)
		if served := r.Finished - before[i].Finished; served != given[dp] || served < 5 {
			t.Errorf("rank %s has served %d requests, %d of 80 were sent there; want as many, and some", dp, served, given[dp])
		}
	}
	f.hears()
	f.agrees("after all that")
	eventually(t, "nothing is booked", func() bool {
		for dp := range ranks {
			if f.value(fmt.Sprintf(`spillway_slots_inflight{dp_rank="%d",worker=%q}`, dp, name)) != 0 {
				return false
			}
		}
		return true
	})
}
