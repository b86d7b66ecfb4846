package dispatch_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"spillway/dispatch"
)

var (
	throughput = flag.Int("throughput", 0, "messages of each run of TestThroughput; 0 leaves it out")
	repeats    = flag.Int("throughput.runs", 3, "runs of TestThroughput in each setting, of which the median counts")
	setting    = flag.String("throughput.setting", "", "the one setting of TestThroughput to run, such as everysec-8")
	profile    = flag.String("throughput.profile", "", "prefix of files for CPU profiles of the dispatcher, one of the last run in each setting")
)

// TestThroughput measures how fast one dispatcher goes with a worker that answers at once, beside
// what the protocol costs at least: a bare loop with as many requests in flight that claims, sends and
// settles messages with the same scripts, one by one. Its rate is the bound that the round trips to
// Redis and to the worker leave, W / (claim + request + settlement), with as many in flight, on the
// same machine and in the same minute.
//
//	go test ./dispatch -run '^TestThroughput$' -v -throughput 20000
func TestThroughput(t *testing.T) {
	if *throughput == 0 {
		t.Skip("measures for a minute; -throughput 20000 has it run")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(lazyCollector))
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, `{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"hello","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`)
	}))
	t.Cleanup(worker.Close)
	t.Logf("%-9s %4s | %9s %9s %9s | %9s %9s %6s | %9s %9s", "fsync", "W", "claim us", "HTTP us", "settle us", "bare/s", "disp/s", "share", "CPU us", "Redis us")
	for _, fsync := range []string{"always", "everysec"} {
		r := startRedis(t, "--appendfsync", fsync)
		for _, w := range []int{1, 8, 64} {
			if *setting != "" && *setting != fmt.Sprint(fsync, "-", w) {
				continue
			}
			n := *throughput
			if w == 1 {
				n /= 4
			}
			var all []rates
			for range *repeats {
				m := bare(t, r, worker.URL, w, n)
				m.add(dispatched(t, r, worker.URL, w, n))
				all = append(all, m)
			}
			slices.SortFunc(all, func(a, b rates) int { return int(1e6 * (a.dispatched/a.bare - b.dispatched/b.bare)) })
			m := all[len(all)/2]
			t.Logf("%-9s %4d | %9.0f %9.0f %9.0f | %9.0f %9.0f %5.0f%% | %9.0f %9.0f", fsync, w, m.claim, m.request, m.settle, m.bare, m.dispatched, 100*m.dispatched/m.bare, m.cpu, m.redis)
		}
	}
}

// rates are what was measured: times in microseconds, of one message.
type rates struct {
	claim, request, settle float64 // of the bare loop
	bare, dispatched       float64 // messages per second
	cpu, redis             float64 // time that dispatcher and Redis spent on a message
}

func (r *rates) add(o rates) { r.dispatched, r.cpu, r.redis = o.dispatched, o.cpu, o.redis }

// crowd enqueues n requests as a producer with a pipeline does.
func crowd(t *testing.T, r *server, n int) {
	t.Helper()
	deadline := time.Now().Unix() + 3600
	ctx := context.Background()
	for i := 0; i < n; {
		pipe := r.Pipeline()
		for ; i < n && pipe.Len() < 2000; i++ {
			pipe.ZAdd(ctx, "q", redis.Z{Score: float64(deadline), Member: fmt.Sprintf(`{"internal":{"request_token":"%032d","request_queue_name":"q","result_queue_name":"result-list"},"request_kind":"redis",`+
				`"data":{"id":"batch-%d","created":1764044000,"deadline":%d,"payload":{"model":"m","prompt":"Say hello to the world, and to all that is in it.","max_tokens":16}}}`, i, i, deadline)})
		}
		if _, err := pipe.Exec(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// bare has w loops take n messages, without a dispatcher.
func bare(t *testing.T, r *server, url string, w, n int) rates {
	t.Helper()
	ctx := context.Background()
	crowd(t, r, n)
	defer r.Del(ctx, "bare-results")
	client := redis.NewClient(&redis.Options{Addr: r.addr(), PoolSize: w, MinIdleConns: w})
	defer client.Close()
	transport := &http.Transport{MaxIdleConns: w, MaxIdleConnsPerHost: w}
	defer transport.CloseIdleConnections()
	b := &dispatch.Bare{Redis: client, Client: &http.Client{Transport: transport}, URL: url + "/v1/completions"}
	if got, err := b.Load(ctx, "q"); err != nil || got != n {
		t.Fatalf("%d messages, %v", got, err)
	}
	var next atomic.Int64
	var times [3]atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for range w {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				claim, request, settle, err := b.Do(ctx, i)
				if err != nil {
					t.Error(err)
					return
				}
				times[0].Add(int64(claim))
				times[1].Add(int64(request))
				times[2].Add(int64(settle))
			}
		})
	}
	wg.Wait()
	us := func(i int) float64 { return float64(times[i].Load()) / 1e3 / float64(n) }
	return rates{claim: us(0), request: us(1), settle: us(2), bare: float64(n) / time.Since(began).Seconds()}
}

// dispatched has a dispatcher of its own process take n messages, and looks from the tenth of them on.
func dispatched(t *testing.T, r *server, url string, w, n int) rates {
	t.Helper()
	ctx := context.Background()
	crowd(t, r, n)
	defer r.Del(ctx, "result-list")
	cfg := config(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency = w }}, queueDoc{"queue_name": "q", "igw_base_url": url})
	o := order{Config: cfg}
	if *profile != "" {
		o.Profile = fmt.Sprintf("%s-%s-%d", *profile, r.args[len(r.args)-1], w)
	}
	c := startChild(t, o)
	type sample struct {
		at         time.Time
		done       int64
		cpu, redis float64
	}
	look := func() sample {
		done, err := r.LLen(ctx, "result-list").Result()
		if err != nil {
			t.Fatal(err)
		}
		return sample{time.Now(), done, cpuSeconds(t, c.cmd.Process.Pid), cpuSeconds(t, r.cmd.Process.Pid)}
	}
	var first, last sample
	eventually(t, "all messages are done", func() bool {
		s := look()
		if s.done < int64(n/10) {
			return false
		}
		if first.done == 0 {
			first = s
		}
		if s.done < int64(n) || last.done == 0 { // the last one before the end
			last = s
		}
		return s.done == int64(n)
	})
	c.end(t)
	d := float64(last.done - first.done)
	return rates{dispatched: d / last.at.Sub(first.at).Seconds(), cpu: 1e6 * (last.cpu - first.cpu) / d, redis: 1e6 * (last.redis - first.redis) / d}
}

// cpuSeconds is the CPU time of a process so far.
func cpuSeconds(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	sum := 0.0
	for _, f := range fields[11:13] { // utime and stime, in ticks of 10 ms
		ticks, err := strconv.ParseFloat(f, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += ticks / 100
	}
	return sum
}
