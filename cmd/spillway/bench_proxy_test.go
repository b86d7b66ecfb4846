package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// benchProxy is what `make bench-proxy` sets.
var benchProxy = flag.Bool("bench-proxy", false, "measure the CPU time of a request through spillway and through a bare httputil.ReverseProxy")

// asBare makes the test binary a bare reverse proxy to the URL that it holds.
const asBare = "SPILLWAY_TEST_AS_BARE_PROXY"

// beBare serves as one until it is killed.
func beBare(worker string) {
	target, err := url.Parse(worker)
	if err == nil {
		var ln net.Listener
		if ln, err = net.Listen("tcp", "127.0.0.1:0"); err == nil {
			fmt.Printf("http://%s\n", ln.Addr())
			err = http.Serve(ln, &httputil.ReverseProxy{
				Transport: &http.Transport{MaxIdleConnsPerHost: benchClients, DisableCompression: true},
				Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
			})
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(exitFailed)
}

// The load of one run. Its processor time is that of benchLong less that of benchShort requests, so
// that what a process takes to start and to warm up does not count.
const (
	benchClients = 32
	benchEvents  = 64 // of a streamed answer
	benchRounds  = 5
)

var benchCases = []struct {
	name        string
	stream      bool
	short, long int // requests
}{{"unary, 1 kB", false, 2000, 22000}, {fmt.Sprintf("stream, %d events", benchEvents), true, 50, 550}}

// benchWorker answers at once, streams with a write and a flush for each event.
func benchWorker(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	switch {
	case err != nil:
		return
	case r.Method == http.MethodGet: // what a front end asks beside requests
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		return
	case !bytes.Contains(body, []byte(`"stream":true`)):
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"content":"`+strings.Repeat("x", 500)+`"}}]}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	event := `data: {"id":"c","choices":[{"index":0,"delta":{"content":"hello"}}],"pad":"` + strings.Repeat("x", 130) + "\"}\n\n"
	for i := range benchEvents {
		if i == benchEvents-1 {
			event = "data: [DONE]\n\n"
		}
		if _, err := io.WriteString(w, event); err != nil || http.NewResponseController(w).Flush() != nil {
			return
		}
	}
}

// bombard sends n requests by benchClients clients.
func bombard(t *testing.T, to string, n int, stream bool) {
	t.Helper()
	body := fmt.Sprintf(`{"model":"m","stream":%t,"max_tokens":64,"messages":[{"role":"user","content":"%s"}]}`, stream, strings.Repeat("spill ", 160))
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: benchClients, DisableCompression: true}}
	defer client.CloseIdleConnections()
	var clients sync.WaitGroup
	for i := range benchClients {
		clients.Go(func() {
			for range (n + benchClients - 1 - i) / benchClients {
				resp, err := client.Post(to+"/v1/chat/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				answer, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != 200 || stream != bytes.HasSuffix(answer, []byte("data: [DONE]\n\n")) {
					t.Errorf("%d, %v: %.100q", resp.StatusCode, err, answer)
					return
				}
			}
		})
	}
	clients.Wait()
}

// price runs a process of its own through n requests and returns what processor time it took in all.
type price func(t *testing.T, worker string, n int, stream bool) time.Duration

func priceOfSpillway(t *testing.T, worker string, n int, stream bool) time.Duration {
	p := start(t, nil, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", worker,
		"--router-mode", "least-loaded", "--active-decode-blocks-threshold", "0.9")
	address := p.await(`Front end: (\S+)\n`)
	for until := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) { // until the worker's model is known
		resp, err := http.Get(address + "/v1/models/m/ready")
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode == 200 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("the worker's model is not ready: %d\n%s", resp.StatusCode, p.stderr.String())
		}
	}
	bombard(t, address, n, stream)
	p.signal(syscall.SIGTERM)
	p.exit()
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

func priceOfBare(t *testing.T, worker string, n int, stream bool) time.Duration {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), asBare+"="+worker)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var address string
	_, scanned := fmt.Fscanln(out, &address)
	if scanned == nil {
		bombard(t, address, n, stream)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
	if scanned != nil {
		t.Fatal(scanned)
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}

// TestBenchProxy prints what a request costs in processor time, beside what it costs a bare
// httputil.ReverseProxy, both as processes of their own under one load in turns. It judges nothing:
// that is for a quiet machine and its reader.
func TestBenchProxy(t *testing.T) {
	if !*benchProxy {
		t.Skip("run by make bench-proxy")
	}
	worker := httptest.NewServer(http.HandlerFunc(benchWorker))
	defer worker.Close()
	for _, c := range benchCases {
		var spent [2][]float64 // µs a request, by round
		var ratios []float64
		for range benchRounds {
			var us [2]float64
			for i, price := range [2]price{priceOfSpillway, priceOfBare} {
				more := price(t, worker.URL, c.long, c.stream) - price(t, worker.URL, c.short, c.stream)
				us[i] = float64(more.Microseconds()) / float64(c.long-c.short)
				spent[i] = append(spent[i], us[i])
			}
			ratios = append(ratios, us[0]/us[1])
		}
		fmt.Printf("%-18s  spillway %7.1f µs/request   ReverseProxy %7.1f   ratio %.2f   (%d rounds: %.2f)\n",
			c.name, middle(spent[0]), middle(spent[1]), middle(ratios), benchRounds, ratios)
	}
}

// middle is the median of an odd number of values.
func middle(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
