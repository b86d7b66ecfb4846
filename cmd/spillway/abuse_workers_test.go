package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// victim is a process of one simulated worker, which always comes back on its ports: port, that of its
// KV events and that of their replay. Its methods are for one goroutine at a time.
type victim struct {
	port   int
	url    string
	load   *tally
	cmd    *exec.Cmd
	exited chan struct{}
	stderr *output
	ends   int // that were no accident
}

func newVictim(t *testing.T, load *tally, rng *rand.Rand) *victim {
	t.Helper()
	v := &victim{load: load}
	for range 100 { // below the ports that connections take, or one could take it while the worker is away
		v.port = 20000 + rng.IntN(10000)
		if !free(t, v.port, v.port+1, v.port+2) {
			continue
		}
		v.url = "http://127.0.0.1:" + strconv.Itoa(v.port)
		if err := v.start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(v.end)
		return v
	}
	t.Fatal("no port is free")
	return nil
}

// free tells whether nobody listens on any of the ports.
func free(t *testing.T, ports ...int) bool {
	t.Helper()
	for _, p := range ports {
		ln, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p))
		if err != nil {
			return false
		}
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return true
}

func (v *victim) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	v.cmd = exec.Command(self, "sim", "--port", strconv.Itoa(v.port), "--speed", strconv.Itoa(abuseSpeed),
		"--kv-blocks", "512", "--max-num-seqs", "32", "--log-level", "error",
		"--kv-events-port", strconv.Itoa(v.port+1), "--kv-replay-port", strconv.Itoa(v.port+2))
	v.cmd.Env = append(os.Environ(), asCommand)
	v.stderr, v.exited = &output{}, make(chan struct{})
	v.cmd.Stderr = v.stderr
	v.cmd.WaitDelay = time.Second
	if err := v.cmd.Start(); err != nil {
		return err
	}
	go func(cmd *exec.Cmd, exited chan struct{}) {
		defer close(exited)
		_ = cmd.Wait() // whoever ends it knows why
	}(v.cmd, v.exited)
	return nil
}

// end kills the process and waits until it is gone.
func (v *victim) end() {
	_ = v.cmd.Process.Kill() // an error means that it has ended
	<-v.exited
}

// suffer kills, ends and stops the process now and then until ctx ends. Afterwards it runs.
func (v *victim) suffer(ctx context.Context, rng *rand.Rand) {
	for rest(ctx, v.exited, time.Duration(500+rng.IntN(4000))*time.Millisecond) {
		switch rng.IntN(4) {
		case 0: // the kernel goes on to accept connections
			_ = v.cmd.Process.Signal(syscall.SIGSTOP)
			rest(ctx, v.exited, time.Duration(rng.IntN(2500))*time.Millisecond)
			_ = v.cmd.Process.Signal(syscall.SIGCONT)
			continue
		case 1:
			_ = v.cmd.Process.Signal(syscall.SIGTERM)
			rest(ctx, v.exited, patience)
		}
		v.end()
		v.ends++
		rest(ctx, nil, time.Duration(rng.IntN(2000))*time.Millisecond)
		if err := v.start(); err != nil {
			v.load.illegal("worker: %v", err)
			return
		}
	}
	select {
	case <-v.exited:
		v.load.illegal("a worker ended by itself: %s", v.stderr)
	default:
	}
}

// rest waits; it reports false if ctx or the process ended meanwhile.
func rest(ctx context.Context, exited <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-exited:
	case <-ctx.Done():
	}
	return false
}

// heal clears all faults; it reports false if the worker could not be asked.
func (v *victim) heal() bool {
	status, _, err := v.call(context.Background(), http.MethodDelete, "/sim/fault", "")
	return err == nil && status == http.StatusOK
}

// idle tells whether no request runs or waits on the worker.
func (v *victim) idle() bool {
	var s simStats
	_, body, err := v.call(context.Background(), http.MethodGet, "/sim/stats", "")
	return err == nil && json.Unmarshal([]byte(body), &s) == nil && s.Running == 0 && s.Waiting == 0
}

// call asks a worker that may be gone.
func (v *victim) call(ctx context.Context, method, path, body string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return exchange(ctx, http.DefaultClient, method, v.url+path, body)
}

// exchange sends a request with a JSON body and returns the whole answer.
func exchange(ctx context.Context, client *http.Client, method, url, body string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// setFaults sets faults of all kinds, several each second, which end by themselves.
func (a *abuse) setFaults(ctx context.Context, rng *rand.Rand) {
	ofRequests := []string{
		"freeze", "reset", "close", "429", "500", "502", "503", "503-overload", "garbage",
		"both-lengths", "oversized-header", "silence", "reset-stream", "close-stream", "freeze-stream",
		"eof", "garbage-framing", "garbage-event", "oversized-event", "error-event", "health-fail",
	}
	ofWorkers := []string{"refuse", "slow", "health-ok", "freeze"}
	for rest(ctx, nil, time.Duration(100+rng.IntN(300))*time.Millisecond) {
		fault := map[string]any{"seconds": 0.2 + 1.8*rng.Float64()}
		if rng.IntN(6) == 0 {
			fault["fault"] = ofWorkers[rng.IntN(len(ofWorkers))]
		} else {
			name := ofRequests[rng.IntN(len(ofRequests))]
			fault["fault"] = name
			switch {
			case strings.HasPrefix(name, "oversized"): // megabytes each time
				fault["count"] = 1 + rng.IntN(2)
			case rng.IntN(2) == 0:
				fault["count"] = 1 + rng.IntN(30)
			default:
				fault["share"] = 0.05 + 0.4*rng.Float64()
			}
			switch {
			case name == "error-event":
				fault["code"] = []int{429, 500, 502, 503}[rng.IntN(4)]
				fallthrough
			case strings.HasSuffix(name, "-stream"), strings.HasPrefix(name, "garbage-"), name == "eof", name == "oversized-event":
				fault["after_tokens"] = rng.IntN(10)
			case strings.HasPrefix(name, "5"), name == "429":
				if rng.IntN(2) == 0 {
					fault["retry_after"] = rng.IntN(3)
				}
			}
		}
		body, err := json.Marshal(fault)
		if err != nil {
			a.load.illegal("fault: %v", err)
			return
		}
		status, answer, err := a.workers[rng.IntN(len(a.workers))].call(ctx, http.MethodPost, "/sim/fault", string(body))
		if err == nil && status != http.StatusOK { // an error means that the worker is away
			a.load.illegal("POST /sim/fault %s = %d %s", body, status, answer)
		}
	}
}

// setThresholds changes the thresholds each second, and compares what it is told with what must
// be set.
func (a *abuse) setThresholds(ctx context.Context, rng *rand.Rand) {
	names := []string{"active_decode_blocks_threshold", "active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac"}
	values := [][]float64{{0, 0.02, 0.2, 0.85, 1}, {0, 500, 8000, 100000}, {0.1, 1, 3}}
	set := map[string]any{"model": "sim-model", names[0]: nil, names[1]: nil}
	for rest(ctx, nil, time.Second) {
		var status int
		var answer string
		var err error
		i := rng.IntN(len(names))
		if rng.IntN(3) > 0 {
			v := values[i][rng.IntN(len(values[i]))]
			set[names[i]] = v
			status, answer, err = exchange(context.WithoutCancel(ctx), a.http, http.MethodPost, a.url+"/busy_threshold",
				fmt.Sprintf(`{"model":"sim-model",%q:%v}`, names[i], v))
		} else {
			query := "?model=sim-model"
			if rng.IntN(2) == 0 {
				query += "&field=" + names[i]
				set[names[i]] = nil
			} else {
				set = map[string]any{"model": "sim-model", names[0]: nil, names[1]: nil}
			}
			status, answer, err = exchange(context.WithoutCancel(ctx), a.http, http.MethodDelete, a.url+"/busy_threshold"+query, "")
		}
		if set[names[2]] == nil {
			delete(set, names[2]) // shown only when it is set
		}
		var got map[string]any
		if err != nil || status != http.StatusOK || json.Unmarshal([]byte(answer), &got) != nil || !reflect.DeepEqual(got, set) {
			a.load.illegal("change of thresholds = %d %s, %v; want %v", status, answer, err, set)
		}
	}
}
