//go:build !race

package upstream_test

import (
	"context"
	"testing"

	"spillway/upstream"
)

// TestAllocations counts a unary exchange on a reused connection, the worker's share (none)
// included. A context that nobody has waited for before makes three more for itself.
func TestAllocations(t *testing.T) {
	const answer = "HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\nok"
	w := newWorker(t, func(p *peer) { benchWorker(p.Conn, 1<<10, []string{answer}) })
	c := w.client(t, upstream.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req := post(prompt[:1<<10])
	req.Head = upstream.AppendHeader(nil, "Content-Type", "application/json")
	got := testing.AllocsPerRun(200, func() {
		resp, err := c.Do(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := resp.Next(); string(body) != "ok" || err != nil {
			t.Fatalf("Next = %q, %v", body, err)
		}
		resp.Close()
	})
	if want := 4.0; got > want {
		t.Errorf("%v allocations, want at most %v", got, want)
	}
}
