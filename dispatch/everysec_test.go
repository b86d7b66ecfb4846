package dispatch_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"spillway/dispatch"
)

var everysec = flag.Bool("everysec", false, "have TestEverySecond measure what appendfsync everysec loses; needs strace")

// TestEverySecond prints what is lost with appendfsync everysec while a producer enqueues and a dispatcher works:
// when Redis is killed, and when the machine loses its power, for which the file is cut to what was there
// when the last fdatasync began that had ended. Messages count as lost if Redis has confirmed them, and
// they have no result in the end.
//
//	go test ./dispatch -run '^TestEverySecond$' -v -everysec
func TestEverySecond(t *testing.T) {
	if !*everysec {
		t.Skip("measures; -everysec has it run")
	}
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skip("strace is not there")
	}
	for _, power := range []bool{false, true} {
		for run := range 5 {
			loseSecond(t, power, run)
		}
	}
}

func loseSecond(t *testing.T, power bool, run int) {
	r := startRedis(t, "--appendfsync", "everysec")
	ctx := context.Background()
	trace := filepath.Join(t.TempDir(), "trace")
	tracer := exec.Command("strace", "-f", "-ttt", "-T", "-e", "trace=fdatasync", "-o", trace, "-p", strconv.Itoa(r.cmd.Process.Pid))
	if err := tracer.Start(); err != nil {
		t.Fatal(err)
	}
	g := newGateway(t, nil)
	d := begin(t, r, setup{cfg: quick, beside: true}, simple(g))

	files, err := filepath.Glob(filepath.Join(r.dir(), "appendonlydir", "*.incr.aof"))
	if err != nil || len(files) != 1 {
		t.Fatalf("files %v, %v", files, err)
	}
	type size struct {
		at    float64
		bytes int64
	}
	var sizes []size
	stop, ended := make(chan struct{}), sync.WaitGroup{}
	ended.Go(func() {
		for {
			if fi, err := os.Stat(files[0]); err == nil {
				sizes = append(sizes, size{float64(time.Now().UnixNano()) / 1e9, fi.Size()})
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	confirmed, times := []string{}, []time.Time{}
	ended.Go(func() {
		for i := 0; ; i++ {
			id := fmt.Sprintf("r%d", i)
			s := dispatch.Submission{ID: id, Deadline: time.Now().Unix() + 3600, Payload: []byte(`{"prompt":"` + id + `"}`), ResultQueue: "result-list"}
			if dispatch.Enqueue(ctx, r.Client, "q", s, time.Now()) == nil {
				confirmed, times = append(confirmed, id), append(times, time.Now())
			}
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	time.Sleep(3*time.Second + time.Duration(run)*230*time.Millisecond)
	r.kill()
	killed := float64(time.Now().UnixNano()) / 1e9
	close(stop)
	ended.Wait()
	_ = tracer.Process.Signal(syscall.SIGINT)
	_ = tracer.Wait()

	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	last := 0.0 // when the last fdatasync began that has ended
	for line := range bytes.Lines(text) {
		f := strings.Fields(string(line))
		if len(f) > 2 && strings.Contains(string(line), "= 0") {
			at, err := strconv.ParseFloat(f[1], 64)
			if err == nil && strings.Contains(string(line), "resumed") { // stamped at its end; -T has how long it took
				took, _ := strconv.ParseFloat(strings.Trim(f[len(f)-1], "<>"), 64)
				at -= took
			}
			last = max(last, at)
		}
	}
	durable := int64(0)
	for _, s := range sizes {
		if s.at <= last {
			durable = s.bytes
		}
	}
	whole, err := os.Stat(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if power {
		if err := os.Truncate(files[0], durable); err != nil {
			t.Fatal(err)
		}
	}
	before := len(g.sent())
	r.start()
	done := map[string]int{}
	eventually(t, "all that is left is done", func() bool {
		return r.left("q") == "" || r.left("q") == "{q}:deliv"
	})
	time.Sleep(500 * time.Millisecond) // results that were kept
	n, _ := r.LLen(ctx, "result-list").Result()
	for _, o := range r.results("result-list", int(n)) {
		done[o.ID]++
	}
	d.stop()
	lost, twice, oldest := 0, 0, 0.0
	for i, id := range confirmed {
		if done[id] == 0 {
			lost++
			oldest = max(oldest, killed-float64(times[i].UnixNano())/1e9)
		}
		if done[id] > 1 {
			twice++
		}
	}
	what := "killed"
	if power {
		what = "power lost"
	}
	t.Logf("%-10s: %5d confirmed, %4d without a result (the oldest of them confirmed %.3f s before), %d with two; %d requests sent, %d of them afterwards; last fdatasync %.3f s before, %d of %d bytes kept",
		what, len(confirmed), lost, oldest, twice, len(g.sent()), len(g.sent())-before, killed-last, map[bool]int64{false: whole.Size(), true: durable}[power], whole.Size())
}
