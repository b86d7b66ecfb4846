package selectservice

import (
	"time"

	"spillway/httperr"
	"spillway/jsonhttp"
)

// SetClock replaces the clock. It is called before any request.
func (s *Server) SetClock(now func() time.Time) { s.now = now }

// Sweep is what happens every few seconds.
func (s *Server) Sweep() { s.sweep(s.now()) }

// Claims is how many IDs are known.
func (s *Server) Claims() int {
	s.ids.mu.Lock()
	defer s.ids.mu.Unlock()
	return len(s.ids.of)
}

// ReadBodies reads body as each route would, and returns the statuses of the failures, 0 for none.
func ReadBodies(body []byte) (statuses []int) {
	var x jsonhttp.Decoder
	for _, grouped := range []bool{false, true} {
		b := newBodies("tenant_id", "routing_group", grouped)
		for _, fields := range [][]field{b.choose, b.reserve, b.book, b.read, b.output, b.peer} {
			x.Reset(body)
			var r request
			statuses = append(statuses, statusOf(jsonhttp.Object(&x, fields, &r)))
		}
	}
	for _, fields := range [][]workerField{registerBody("tenant_id", "routing_group"), patchBody} {
		x.Reset(body)
		var r registration
		statuses = append(statuses, statusOf(jsonhttp.Object(&x, fields, &r)))
	}
	return statuses
}

func statusOf(failed interface{ Error() string }) int {
	if e, ok := failed.(*httperr.Error); ok && e != nil {
		return e.Status
	}
	return 0
}
