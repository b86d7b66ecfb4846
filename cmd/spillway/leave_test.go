package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"spillway/configs"
	"spillway/router"
)

// TestClientsLeave sends 200 clients, of whom every fifth leaves at a random moment: before
// the head or in the middle of the stream. Nothing of them may stay booked.
func TestClientsLeave(t *testing.T) { inModes(t, testClientsLeave) }

func testClientsLeave(t *testing.T, mode router.Mode) {
	f := begin(t, mode, func(c *configs.Demo) {
		c.Sim.Speed, c.Sim.Count = 20, 2
		c.Serving.Busy.ActiveDecodeBlocksThreshold, c.Serving.Busy.ActivePrefillTokensThreshold = nil, nil
	})
	f.http.Transport.(*http.Transport).MaxIdleConnsPerHost = 50
	var whole, left atomic.Int32
	var clients sync.WaitGroup
	for i := range 200 {
		clients.Go(func() {
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			leaves, early := i%5 == 0, i%10 == 0
			if early { // perhaps before the head
				defer time.AfterFunc(time.Duration(rand.IntN(100_000))*time.Microsecond, leave).Stop()
			}
			body := fmt.Sprintf(`{"model":"sim-model","stream":%v,"max_tokens":100,"ignore_eos":true,"messages":[{"role":"user","content":%q}]}`,
				i%4 != 0 || leaves, strings.Repeat("Hello. ", rand.IntN(100)))
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			resp, err := f.http.Do(req)
			if err == nil {
				defer resp.Body.Close()
				if leaves && !early { // after some of the stream
					_, _ = io.CopyN(io.Discard, resp.Body, int64(1+rand.IntN(2000)))
					leave()
				}
				_, rest := io.Copy(io.Discard, resp.Body)
				err = rest
			}
			switch {
			case err != nil && leaves:
				left.Add(1)
			case err != nil || resp.StatusCode != http.StatusOK:
				t.Errorf("a client that stays: %v, %v", resp, err)
			default:
				whole.Add(1)
			}
		})
	}
	clients.Wait()
	if left.Load() == 0 {
		t.Error("all answers were faster than the clients that leave")
	}
	eventually(t, "the last request is over", func() bool {
		for _, n := range f.metrics("spillway_slots_inflight") {
			if n != "0" {
				return false
			}
		}
		return true
	})
	f.settled()
	eventually(t, "the workers have nothing to do", func() bool { s := f.stats(); return s.Running+s.Waiting == 0 })
	if s := f.stats(); s.Finished < int(whole.Load()) {
		t.Errorf("%d requests were finished by the workers, but %d clients got whole answers", s.Finished, whole.Load())
	}
}
