package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/goleak"

	"spillway/wire"
)

// hostileFront is a front end in mode kv, in this process, before one worker that answers completions and, of
// the rest, what a test likes.
type hostileFront struct {
	t          *testing.T
	url, admin string
}

func startHostileFront(t *testing.T, tokenizer http.HandlerFunc, flags ...string) *hostileFront {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		goleak.VerifyNone(t, before)
	})
	said := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, text)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", said(""))
	mux.HandleFunc("/v1/models", said(`{"data":[{"id":"m"}]}`))
	mux.HandleFunc("/metrics", said("vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0.1\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1\n"))
	mux.HandleFunc("/v1/completions", said(`{"id":"c","object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`))
	mux.HandleFunc("/tokenize", tokenizer)
	worker := httptest.NewServer(mux)
	t.Cleanup(worker.Close)
	_, d, _ := serveFrontend(t, append([]string{
		"--workers", worker.URL, "--router-mode", "kv", "--tokenizer", "tokenize", "--http-host", "127.0.0.1", "--http-port", "0", "--admin-addr", "127.0.0.1:0",
	}, flags...)...)
	f := &hostileFront{t: t, url: d.url(), admin: d.adminURL()}
	eventually(t, "the worker can be sent to", func() bool {
		status, _ := fetch(t, f.url+"/v1/models/m/ready")
		return status == 200
	})
	return f
}

// serves sends prompts of their own, some at once, and wants them all answered.
func (f *hostileFront) serves(from, to int) {
	f.t.Helper()
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := from + c; i < to; i += 4 {
				body := fmt.Sprintf(`{"model":"m","max_tokens":1,"prompt":%q}`, prompt(i, i, 30))
				resp, err := http.Post(f.url+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					f.t.Error(err)
					return
				}
				if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
					f.t.Errorf("completion %d is answered %d %.200s, %v", i, resp.StatusCode, text, err)
				}
				_ = resp.Body.Close()
			}
		})
	}
	clients.Wait()
}

// sum is that of all series of a name, which may be followed by the first labels.
func (f *hostileFront) sum(name string) (sum float64) {
	f.t.Helper()
	_, page := fetch(f.t, f.admin+"/metrics")
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, name); ok && strings.IndexByte("{ ,", rest[0]) >= 0 {
			v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]), 64)
			if err != nil {
				f.t.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}

// TestHostileTokenizer has a worker answer nonsense of all kinds when it is asked for tokens: requests are served,
// as if it had not been asked, nothing of it is remembered, and nothing stays.
func TestHostileTokenizer(t *testing.T) {
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) }
	}
	raw := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(conn, s)
			_ = conn.Close()
		}
	}
	// without end writes a piece again and again until nobody reads any more.
	withoutEnd := func(piece string, every time.Duration) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			out := bufio.NewWriterSize(w, 1<<16)
			_, err := io.WriteString(out, `{"count":1,"tokens":[`)
			for err == nil && r.Context().Err() == nil {
				if _, err = io.WriteString(out, piece); every > 0 && err == nil {
					err = errors.Join(out.Flush(), http.NewResponseController(w).Flush())
					select {
					case <-r.Context().Done():
					case <-time.After(every):
					}
				}
			}
		}
	}
	for _, tt := range []struct {
		name   string
		answer http.HandlerFunc
	}{
		{"an ID beyond 32 bits", text(`{"count":2,"tokens":[1,4294967296]}`)},
		{"an ID of many digits", text(`{"count":1,"tokens":[` + strings.Repeat("9", 100_000) + `]}`)},
		{"IDs below 0", text(`{"count":1,"tokens":[-1]}`)},
		{"fractions", text(`{"count":1,"tokens":[1.5]}`)},
		{"powers", text(`{"count":1,"tokens":[1e3]}`)},
		{"too few", text(`{"count":3,"tokens":[1,2]}`)},
		{"too many", text(`{"count":1,"tokens":[1,2]}`)},
		{"a count alone", text(`{"count":18446744073709551615}`)},
		{"a count beyond 64 bits", text(`{"count":18446744073709551617,"tokens":[1]}`)},
		{"none", text(`{"count":0,"tokens":[]}`)},
		{"texts", text(`{"count":1,"tokens":["1"]}`)},
		{"nothing", text("")},
		{"null", text("null")},
		{"a page", text("<html>")},
		{"zeros", text(strings.Repeat("\x00", 1000))},
		{"depth", text(`{"a":` + strings.Repeat("[", 200_000))},
		{"millions", text(`{"count":3000000,"tokens":[` + strings.Repeat("1,", 2_999_999) + `1]}`)},
		{"half an answer", raw("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{\"count\":1,")},
		{"half of a chunk", raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n{\"count\":1,\"tokens\":[1]}")},
		{"a chunk of any length", raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}")},
		{"two lengths", raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 24\r\n\r\n{\"count\":1,\"tokens\":[1]}")},
		{"a length below 0", raw("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{\"count\":1,\"tokens\":[1]}")},
		{"a length of exabytes", raw("HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\n{\"count\":1,\"tokens\":[1]}")},
		{"a head without end", raw("HTTP/1.1 200 OK\r\n" + strings.Repeat("A: "+strings.Repeat("b", 1000)+"\r\n", 2000))},
		{"no HTTP", raw("SSH-2.0-OpenSSH_9.6\r\n")},
		{"an end", raw("")},
		{"other protocols", raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n")},
		{"elsewhere", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) }},
		{"IDs without end", withoutEnd("1,", 0)},
		{"one after another", withoutEnd("1,", 20*time.Millisecond)},
		{"silence", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := startHostileFront(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body) // or nobody notices that the client has left
				tt.answer(w, r)
			})
			f.serves(0, 12)
			for name, want := range map[string]float64{
				"spillway_tokenizer_cache_entries": 0, `spillway_kv_prompts_total{model="m",source="tokenizer"}`: 0, `spillway_tokenizer_calls_total{outcome="ok"`: 0,
			} {
				if got := f.sum(name); got != want {
					t.Errorf("%s = %v, want %v", name, got, want)
				}
			}
			if f.sum("spillway_tokenizer_calls_total") == 0 {
				t.Error("the worker was not asked, which is no test")
			}
			eventually(t, "nothing is booked, and nobody asked", func() bool {
				return f.sum("spillway_slots_inflight") == 0 && f.sum("spillway_tokenizer_inflight") == 0
			})
		})
	}
}

// TestHostilePublisher has what should be KV events, and replays of them, be anything: requests are served
// meanwhile, and with the worker all that it has told is gone.
func TestHostilePublisher(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	nonsense := func(rng *rand.Rand) []byte {
		b := make([]byte, rng.IntN(300))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	payload := func(rng *rand.Rand) []byte {
		var events []wire.KVPublished
		for range 1 + rng.IntN(3) {
			e := wire.KVPublished{Kind: []wire.KVKind{wire.KVStore, wire.KVStore, wire.KVStore, wire.KVRemove, wire.KVClear}[rng.IntN(5)], BlockSize: []uint32{16, 16, 16, 0, 1 << 31}[rng.IntN(5)]}
			for range rng.IntN(5) {
				e.Hashes = append(e.Hashes, rng.Uint64N(50))
				for range 16 {
					e.Tokens = append(e.Tokens, rng.Uint32())
				}
			}
			e.HasParent, e.Parent = rng.IntN(2) == 0, rng.Uint64N(50)
			events = append(events, e)
		}
		b := wire.AppendKVBatch(nil, []wire.KVLayout{wire.KVArrays, wire.KVMaps}[rng.IntN(2)], rng.NormFloat64(), rng.Uint32N(40), events)
		switch rng.IntN(5) {
		case 0:
			return b[:rng.IntN(len(b))]
		case 1, 2:
			for range 1 + rng.IntN(4) {
				b[rng.IntN(len(b))] = byte(rng.Uint32())
			}
		case 3:
			return nonsense(rng)
		}
		return b
	}
	frames := func(rng *rand.Rand, seq uint64) [][]byte {
		all := [][]byte{[]byte("topic"), binary.BigEndian.AppendUint64(nil, seq), payload(rng)}
		if rng.IntN(10) == 0 {
			all[rng.IntN(2)] = nonsense(rng)
		}
		return all[:len(all)-rng.IntN(10)/9]
	}

	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	base := freePorts(t, 2)
	pub, err := zctx.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	router, err := zctx.NewSocket(zmq.ROUTER)
	if err == nil {
		err = errors.Join(pub.SetLinger(0), pub.Bind(fmt.Sprintf("tcp://127.0.0.1:%d", base)),
			router.SetLinger(0), router.SetRcvtimeo(20*time.Millisecond), router.Bind(fmt.Sprintf("tcp://127.0.0.1:%d", base+1)))
	}
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() { // replays
		rng := rand.New(rand.NewPCG(seed, 2))
		for {
			select {
			case <-done:
				if err := router.Close(); err != nil {
					t.Error(err)
				}
				return
			default:
			}
			asked, err := router.RecvMessageBytes(0)
			if err != nil {
				continue
			}
			for range rng.IntN(50) {
				reply := append([][]byte{asked[0], {}}, frames(rng, rng.Uint64N(2000))...)
				if _, err := router.SendMessage(reply); err != nil {
					break // it has left
				}
			}
			if rng.IntN(2) == 0 {
				_, _ = router.SendMessage(asked[0], []byte{}, []byte{}, binary.BigEndian.AppendUint64(nil, 1<<64-1), []byte{})
			}
		}
	})
	ended.Go(func() { // events
		for i := uint64(0); ; i++ {
			select {
			case <-done:
				if err := pub.Close(); err != nil {
					t.Error(err)
				}
				return
			case <-time.After(2 * time.Millisecond):
			}
			seq := i
			if rng.IntN(50) == 0 {
				seq = rng.Uint64() >> rng.IntN(64)
			}
			if _, err := pub.SendMessage(frames(rng, seq)); err != nil && zmq.AsErrno(err) != zmq.ETERM {
				continue
			}
		}
	})
	t.Cleanup(func() { // before goroutines are counted
		close(done)
		ended.Wait()
		if err := zctx.Term(); err != nil {
			t.Error(err)
		}
	})

	f := startHostileFront(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"count":17,"tokens":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}`)
	}, "--kv-events-port", strconv.Itoa(base), "--kv-replay-port", strconv.Itoa(base+1))
	served := 0
	eventually(t, "there was nonsense of all kinds", func() bool {
		f.serves(served, served+20)
		served += 20
		return f.sum("spillway_kv_batches_received_total") > 500 && f.sum(`spillway_kv_decode_errors_total{kind="frames"}`) > 5 &&
			f.sum(`spillway_kv_decode_errors_total{kind="batch"}`) > 5 && f.sum("spillway_kv_gaps_total") > 5 && f.sum("spillway_kv_replays_total") > 0
	})
	if n, most := f.sum("spillway_kv_index_entries"), f.sum("spillway_kv_index_entries_limit"); n > most {
		t.Errorf("the index has %v entries, want no more than %v", n, most)
	}
	_, list := fetch(t, f.admin+"/workers")
	_, rest, _ := strings.Cut(list, `"worker_id":`)
	id, _, _ := strings.Cut(rest, ",")
	if status, body := ask(t, "DELETE", f.admin+"/workers/"+id, ""); status != 200 {
		t.Fatalf("DELETE /workers/%s = %d %s", id, status, body)
	}
	if n := f.sum("spillway_kv_index_entries"); n != 0 {
		t.Errorf("%v entries are left of a worker that is gone", n)
	}
	if n := f.sum("spillway_slots_inflight"); n != 0 {
		t.Errorf("%v requests are booked", n)
	}
}
