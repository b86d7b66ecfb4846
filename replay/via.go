package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// viaSelect is the value of --via for the selection service.
const viaSelect = "select-service"

// releaseLimit bounds the calls that end a reservation. They are made however the request ended.
const releaseLimit = 30 * time.Second

// selector asks the selection service for a worker, and tells it how the request fares. It is safe
// for concurrent use.
type selector struct {
	base      string
	path      string // of the worker's endpoint
	model     string
	tokenize  func(text string, chat bool) []uint32
	chat      bool
	transport *http.Transport

	mu sync.Mutex // guards the fields below
	lifecycle
}

// lifecycle counts the calls of reservations.
type lifecycle struct {
	selected, prefilled, freed, failed int
	latency                            Histogram // of selections that were made
}

// Lifecycle tells how asking the selection service went; warm-up is included.
type Lifecycle struct {
	Selected         int       `json:"selected"` // reservations made
	PrefillCompleted int       `json:"prefill_completed"`
	Freed            int       `json:"freed"`
	Failed           int       `json:"failed"` // calls about reservations that were not answered with 200
	Latency          Quantiles `json:"select_latency"`
}

func (s *selector) report() *Lifecycle {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return &Lifecycle{s.selected, s.prefilled, s.freed, s.failed, quantiles(&s.latency)}
}

// build returns the body that asks for a worker for r.
func (s *selector) build(r *Request) []byte {
	if s == nil {
		return nil
	}
	tokens := s.tokenize(string(AppendPrompt(nil, r)), s.chat)
	out := make([]byte, 0, 11*len(tokens)+128)
	name, _ := json.Marshal(s.model) // a string always has a JSON form
	out = append(append(append(out, `{"model_name":`...), name...), `,"token_ids":[`...)
	for i, t := range tokens {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendUint(out, uint64(t), 10)
	}
	out = strconv.AppendInt(append(out, `],"expected_output_tokens":`...), int64(r.OSLTokens), 10)
	return append(out, '}')
}

// reservation is a rank that the service has chosen and booked.
type reservation struct {
	selector *selector
	target   *url.URL
	rank     string
	told     sync.WaitGroup // of the first token

	ID       string `json:"reservation_id"`
	Worker   uint64 `json:"worker_id"`
	DP       uint32 `json:"dp_rank"`
	Endpoint string `json:"endpoint"`
}

// ask returns a reservation, or the result of a request that got none.
func (s *selector) ask(ctx context.Context, body []byte) (*reservation, result) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.base+"/select_and_reserve", bytes.NewReader(body))
	if err != nil {
		return nil, result{outcome: failed, detail: "select: no request"}
	}
	req.Header.Set("Content-Type", "application/json")
	asked := time.Now()
	resp, err := s.transport.RoundTrip(req)
	if err != nil {
		return nil, broken(ctx, "select: "+headFailure(err))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		res := refusal(resp, result{})
		res.detail = "select: " + res.detail
		return nil, res
	}
	r := &reservation{selector: s}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil {
		err = json.Unmarshal(text, r)
	}
	if err == nil && r.ID == "" {
		err = fmt.Errorf("no reservation_id")
	}
	if err != nil {
		return nil, broken(ctx, "select: malformed answer")
	}
	s.mu.Lock()
	s.selected++
	s.latency.Add(time.Since(asked))
	s.mu.Unlock()
	r.rank = strconv.FormatUint(uint64(r.DP), 10)
	if r.target, err = url.Parse(strings.TrimRight(r.Endpoint, "/") + s.path); err != nil {
		r.release(ctx)
		return nil, result{outcome: failed, detail: "select: malformed endpoint"}
	}
	return r, result{}
}

// firstToken tells the service that the prompt has been computed, without making the reader wait.
func (r *reservation) firstToken(ctx context.Context) {
	r.told.Go(func() {
		r.call(ctx, http.MethodPost, "/prefill_complete", &r.selector.prefilled)
	})
}

// release gives the reservation back.
func (r *reservation) release(ctx context.Context) {
	r.told.Wait()
	r.call(ctx, http.MethodDelete, "", &r.selector.freed)
}

// call makes one call about the reservation, even if the client has left, and counts it.
func (r *reservation) call(ctx context.Context, method, path string, counter *int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
	defer cancel()
	s, ok := r.selector, false
	req, err := http.NewRequestWithContext(ctx, method, s.base+"/reservations/"+url.PathEscape(r.ID)+path, nil)
	if err == nil {
		var resp *http.Response
		if resp, err = s.transport.RoundTrip(req); err == nil {
			_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
			_ = resp.Body.Close()
			ok = resp.StatusCode == http.StatusOK
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ok {
		*counter++
	} else {
		s.failed++
	}
}
