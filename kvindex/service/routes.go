package service

import (
	"io"
	"net/http"
	"slices"
	"strconv"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/kvindex"
	"spillway/wire"
	"spillway/worker"
)

// handler answers one request.
type handler = func(w http.ResponseWriter, r *http.Request) *httperr.Error

// table lists the routes.
func (s *Server) table() []jsonhttp.Route {
	get := func(path string, serve handler) jsonhttp.Route {
		return jsonhttp.Route{Method: http.MethodGet, Path: path, Public: true, Serve: serve}
	}
	post := func(path string, fields []field, serve func(x *exchange) (int, *httperr.Error)) jsonhttp.Route {
		return jsonhttp.Route{Method: http.MethodPost, Path: path, Public: true, Serve: s.post(fields, serve)}
	}
	return []jsonhttp.Route{
		get("/health", s.health),
		get("/ready", s.ready),
		get("/workers", s.workers),
		get("/dump", s.dump),
		get("/peers", s.listPeers),
		post("/register", registerBody, s.register),
		post("/unregister", unregisterBody, s.unregister),
		post("/query", queryBody, s.query),
		post("/query_by_hash", hashesBody, s.queryByHash),
		post("/register_peer", peerBody, s.registerPeer),
		post("/deregister_peer", peerBody, s.deregisterPeer),
		// For what rotates the original's access log; we have no file of our own.
		{Method: http.MethodPost, Path: "/reopen_logs", Public: true, Serve: s.health},
	}
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	jsonhttp.Send(w, http.StatusOK, jsonhttp.OK)
	return nil
}

var errNotReady = httperr.New(http.StatusServiceUnavailable, "the index is being recovered")

// ready is 503 until recovery is over.
func (s *Server) ready(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	if !s.link.Ready() {
		return errNotReady
	}
	jsonhttp.Send(w, http.StatusOK, jsonhttp.OK)
	return nil
}

func (s *Server) register(x *exchange) (int, *httperr.Error) {
	return http.StatusCreated, s.registry.register(&x.request)
}

func (s *Server) unregister(x *exchange) (int, *httperr.Error) {
	return http.StatusOK, s.registry.unregister(&x.request)
}

// workers lists workers by ID, with how listening to their ranks fares.
func (s *Server) workers(w http.ResponseWriter, r *http.Request) *httperr.Error {
	var model, tenant, group *string
	failed := jsonhttp.Query(r.URL.RawQuery, jsonhttp.Param{Name: "model_name", To: &model},
		jsonhttp.Param{Name: "tenant_id", To: &tenant}, jsonhttp.Param{Name: "routing_group", To: &group})
	if failed != nil {
		return failed
	}
	if tenant == nil {
		tenant = group
	}
	all := s.registry.list(model, tenant)
	of := map[worker.ID][]Listener{}
	for _, l := range s.link.Listeners() {
		of[l.Rank.Worker] = append(of[l.Rank.Worker], l)
	}
	b := []byte{'['}
	for i := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendWorker(b, &all[i], of[all[i].id])
	}
	jsonhttp.Send(w, http.StatusOK, append(b, ']'))
	return nil
}

func appendWorker(b []byte, w *listed, listeners []Listener) []byte {
	b = jsonhttp.AppendUint(b, `{"instance_id":`, uint64(w.id))
	b = jsonhttp.AppendText(append(b, `,"source":"zmq","status":`...), together(listeners))
	b = jsonhttp.AppendText(append(b, `,"model_name":`...), w.partition.Model)
	b = jsonhttp.AppendText(append(b, `,"tenant_id":`...), w.partition.Tenant)
	b = jsonhttp.AppendUint(b, `,"block_size":`, uint64(w.blockSize))
	b = append(b, `,"endpoints":{`...)
	for i, l := range listeners {
		b = jsonhttp.AppendText(appendKey(b, i, l.Rank.DP), l.Endpoint)
	}
	b = append(b, `},"listeners":{`...)
	var strangers []uint32
	registered := map[uint32]bool{} // perhaps only since they came up in events
	for i, l := range listeners {
		b = jsonhttp.AppendText(append(appendKey(b, i, l.Rank.DP), `{"endpoint":`...), l.Endpoint)
		b = jsonhttp.AppendText(append(b, `,"status":`...), l.Status)
		if l.LastError != "" {
			b = jsonhttp.AppendText(append(b, `,"last_error":`...), l.LastError)
		}
		b = strconv.AppendBool(append(b, `,"degraded":`...), l.Degraded)
		if l.Applied != nil {
			b = jsonhttp.AppendUint(b, `,"applied":`, *l.Applied)
		}
		b = append(b, '}')
		strangers = append(strangers, l.Strangers...)
		registered[l.Rank.DP] = true
	}
	strangers = slices.DeleteFunc(strangers, func(dp uint32) bool { return registered[dp] })
	b = append(b, `},"unregistered_ranks":[`...)
	slices.Sort(strangers)
	for i, dp := range slices.Compact(strangers) {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(dp), 10)
	}
	return append(b, `]}`...)
}

// appendKey appends the i-th name of an object, which is a number.
func appendKey[N ~uint32 | ~uint64](b []byte, i int, n N) []byte {
	if i > 0 {
		b = append(b, ',')
	}
	return append(strconv.AppendUint(append(b, '"'), uint64(n), 10), `":`...)
}

// together is the status of a worker with these listeners: the first of those that one has.
func together(listeners []Listener) string {
	for _, status := range []string{"failed", "pending", "active"} {
		if slices.ContainsFunc(listeners, func(l Listener) bool { return l.Status == status }) {
			return status
		}
	}
	return "paused"
}

// dump writes what the index holds, a partition after the other, while events go on.
func (s *Server) dump(w http.ResponseWriter, r *http.Request) *httperr.Error {
	err := jsonhttp.SendLong(w, r, func(to io.Writer) error { return WriteDump(to, s.registry.known()) })
	if err != nil {
		s.log.Info("a dump was not read to its end", "err", err)
	}
	return nil
}

// WriteDump writes what partitions hold, in the form that others recover from.
func WriteDump(w io.Writer, all []*kvindex.Partition) error {
	d := wire.NewDumpWriter(w)
	for _, p := range all {
		d.Partition(p.Name, uint32(p.BlockSize()))
		p.Index.Dump(func(run kvindex.Run) bool {
			return d.Store(&wire.KVEvent{
				Kind: wire.KVStore, Rank: run.Rank, Tier: run.Tier, HasParent: run.Parent.Set, Parent: run.Parent.Hash,
				Engine: run.Engine, Local: run.Local,
			})
		})
	}
	return d.Close()
}
