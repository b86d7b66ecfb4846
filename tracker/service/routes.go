package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/tracker"
	"spillway/worker"
)

// handler answers one request.
type handler = func(w http.ResponseWriter, r *http.Request) *httperr.Error

// table lists the routes.
func (s *Server) table() []jsonhttp.Route {
	get := func(path string, public bool, serve handler) jsonhttp.Route {
		return jsonhttp.Route{Method: http.MethodGet, Path: path, Public: public, Serve: serve}
	}
	post := func(path string, fields []field, serve func(context.Context, *exchange, time.Time) (int, *httperr.Error)) jsonhttp.Route {
		return jsonhttp.Route{Method: http.MethodPost, Path: path, Serve: s.post(fields, serve)}
	}
	return []jsonhttp.Route{
		get("/health", true, s.health),
		get("/ready", true, s.ready),
		get("/workers", false, s.workers),
		get("/loads", false, s.loads),
		get("/peers", false, s.peers),
		post("/register", registerBody, s.register),
		post("/unregister", unregisterBody, s.unregister),
		post("/add", addBody, s.add),
		post("/prefill_complete", namedBody, s.prefillComplete),
		post("/output_block", outputBody, s.outputBlock),
		post("/free", namedBody, s.free),
		post("/potential_loads", potentialBody, s.potentialLoads),
		post("/register_peer", peerBody, s.registerPeer),
		post("/deregister_peer", peerBody, s.deregisterPeer),
	}
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	w.Header()["Content-Length"] = []string{"0"}
	return nil
}

// ready is 503 to requests that are still read while the process is about to end. It does not listen
// any more then, so others are refused.
func (s *Server) ready(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	if s.draining.Load() {
		return httperr.New(http.StatusServiceUnavailable, "the process is about to end")
	}
	jsonhttp.Send(w, http.StatusOK, jsonhttp.OK)
	return nil
}

func (s *Server) register(_ context.Context, x *exchange, now time.Time) (int, *httperr.Error) {
	return http.StatusCreated, s.registry.register(&x.request, now)
}

func (s *Server) unregister(_ context.Context, x *exchange, _ time.Time) (int, *httperr.Error) {
	return http.StatusOK, s.registry.unregister(&x.request)
}

func (s *Server) add(_ context.Context, x *exchange, now time.Time) (int, *httperr.Error) {
	r := &x.request
	p, failed := s.registry.find(r.partition())
	if failed != nil {
		return 0, failed
	}
	booked := tracker.Reservation{ID: r.id, Rank: r.rank(), Hashes: r.hashes, PrefillTokens: r.tokens, Expires: true}
	switch err := p.tracker.Reserve(booked, tracker.NoLimit, now); {
	case errors.Is(err, tracker.ErrUnknownRank):
		return 0, httperr.New(http.StatusNotFound, fmt.Sprintf("worker_id %d has no dp_rank %d for %s", r.workerID, r.dp, name(p.key)))
	case errors.Is(err, tracker.ErrDuplicate):
		return 0, httperr.New(http.StatusConflict, fmt.Sprintf("request_id: %.256q is active already for %s", r.id, name(p.key)))
	case err != nil:
		return 0, httperr.From(err, p.key.Model, http.StatusServiceUnavailable)
	}
	if s.link.Added != nil {
		booked.Hashes = slices.Clone(booked.Hashes) // ours are used again
		s.link.Added(p.key, p.blockSize, booked)
	}
	return http.StatusCreated, nil
}

func unknownRequest(id string, p worker.Partition) *httperr.Error {
	return httperr.New(http.StatusNotFound, fmt.Sprintf("request_id: %.256q is not active for %s", id, name(p)))
}

func (s *Server) prefillComplete(_ context.Context, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.registry.find(x.partition())
	if failed != nil {
		return 0, failed
	}
	rank, effect := p.tracker.PrefillDone(x.id, now)
	if effect == tracker.Unknown {
		return 0, unknownRequest(x.id, p.key)
	}
	if s.link.PrefillDone != nil {
		s.link.PrefillDone(p.key, p.blockSize, x.id, rank)
	}
	return http.StatusOK, nil
}

func (s *Server) outputBlock(_ context.Context, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.registry.find(x.partition())
	if failed != nil {
		return 0, failed
	}
	if _, effect := p.tracker.Grow(x.id, 1, x.decay, now); effect == tracker.Unknown {
		return 0, unknownRequest(x.id, p.key)
	}
	return http.StatusOK, nil
}

func (s *Server) free(_ context.Context, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.registry.find(x.partition())
	if failed != nil {
		return 0, failed
	}
	if rank, known := p.tracker.Free(x.id, now); known && s.link.Freed != nil {
		s.link.Freed(p.key, p.blockSize, x.id, rank)
	}
	return http.StatusOK, nil
}

func (s *Server) potentialLoads(_ context.Context, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.registry.find(x.partition())
	if failed != nil {
		return 0, failed
	}
	x.list = p.tracker.Project(x.hashes, now, x.list[:0])
	b := append(x.Out[:0], '[')
	for i := range x.list {
		r := &x.list[i]
		blocks, tokens := r.Potential(x.tokens)
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendUint(b, `{"worker_id":`, uint64(r.Worker))
		b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(r.DP))
		b = jsonhttp.AppendUint(b, `,"potential_prefill_tokens":`, tokens)
		b = jsonhttp.AppendUint(b, `,"potential_decode_blocks":`, blocks)
		b = jsonhttp.AppendUint(b, `,"active_requests":`, r.Requests)
		b = append(b, '}')
	}
	x.Out = append(b, ']')
	return http.StatusOK, nil
}

func (s *Server) workers(w http.ResponseWriter, r *http.Request) *httperr.Error {
	f, failed := parseFilter(r.URL.RawQuery)
	if failed != nil {
		return failed
	}
	b := []byte{'['}
	for _, p := range s.registry.matching(f) {
		ids, of := s.registry.workersOf(p)
		for _, id := range ids {
			if len(b) > 1 {
				b = append(b, ',')
			}
			b = appendPartition(jsonhttp.AppendUint(b, `{"worker_id":`, id), `,"model_name":`, p.key)
			b = jsonhttp.AppendUint(b, `,"block_size":`, uint64(p.blockSize))
			b = jsonhttp.AppendUint(b, `,"dp_start":`, uint64(of[id].start))
			b = append(jsonhttp.AppendUint(b, `,"dp_size":`, uint64(of[id].size)), '}')
		}
	}
	jsonhttp.Send(w, http.StatusOK, append(b, ']'))
	return nil
}

func appendPartition(b []byte, before string, p worker.Partition) []byte {
	b = jsonhttp.AppendText(append(b, before...), p.Model)
	return jsonhttp.AppendText(append(b, `,"tenant_id":`...), p.Tenant)
}

func (s *Server) loads(w http.ResponseWriter, r *http.Request) *httperr.Error {
	f, failed := parseFilter(r.URL.RawQuery)
	if failed != nil {
		return failed
	}
	x := take()
	defer x.put()
	now, b := s.now(), append(x.Out[:0], '[')
	for _, p := range s.registry.matching(f) {
		x.list = p.tracker.Project(nil, now, x.list[:0])
		slices.SortFunc(x.list, func(a, b tracker.Projection) int {
			return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DP, b.DP))
		})
		for i := range x.list {
			r := &x.list[i]
			if len(b) > 1 {
				b = append(b, ',')
			}
			b = appendPartition(b, `{"model_name":`, p.key)
			b = jsonhttp.AppendUint(b, `,"worker_id":`, uint64(r.Worker))
			b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(r.DP))
			b = jsonhttp.AppendUint(b, `,"active_prefill_tokens":`, r.PrefillTokens)
			b = append(jsonhttp.AppendUint(b, `,"active_decode_blocks":`, r.DecodeBlocks), '}')
		}
	}
	x.Out = append(b, ']')
	jsonhttp.Send(w, http.StatusOK, x.Out)
	return nil
}

func (s *Server) peers(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	var list []string
	if s.link.Peers != nil {
		list = s.link.Peers()
	}
	b := []byte{'['}
	for i, peer := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendText(b, peer)
	}
	jsonhttp.Send(w, http.StatusOK, append(b, ']'))
	return nil
}

var errNoReplicas = httperr.New(http.StatusConflict, "replication is off: it needs replica-sync-bind")

func (s *Server) registerPeer(ctx context.Context, x *exchange, _ time.Time) (int, *httperr.Error) {
	if s.link.RegisterPeer == nil {
		return 0, errNoReplicas
	}
	added, err := s.link.RegisterPeer(ctx, x.url)
	switch {
	case err != nil:
		return 0, peerError(err)
	case added:
		return http.StatusCreated, nil
	}
	return http.StatusOK, nil
}

func (s *Server) deregisterPeer(ctx context.Context, x *exchange, _ time.Time) (int, *httperr.Error) {
	if s.link.DeregisterPeer == nil {
		return 0, errNoReplicas
	}
	if err := s.link.DeregisterPeer(ctx, x.url); err != nil {
		return 0, peerError(err)
	}
	return http.StatusOK, nil
}

func peerError(err error) *httperr.Error {
	if errors.Is(err, context.DeadlineExceeded) {
		return httperr.New(http.StatusServiceUnavailable, "the exchange with replicas does not answer")
	}
	return httperr.From(err, "", http.StatusServiceUnavailable)
}
