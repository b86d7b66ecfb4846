package proxy

import (
	"math"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/sony/gobreaker/v2"

	"spillway/busy"
	"spillway/httperr"
	"spillway/router"
	"spillway/worker"
)

// model is what the server remembers of one model while the process lives.
type model struct {
	name    string
	metrics *modelMetrics
	error   mean // of counted over estimated prompt tokens, within 0.25 to 4
	freed   rates
	gauge   gauge // of its pool

	refusals refusals // as far as they are logged
}

// models are the models that have been asked for, by canonical name: as many as the catalog has
// known, so never more than an operator has registered.
type models struct {
	made    func(name string) *modelMetrics
	known   sync.Map // name -> *model
	created sync.Map // any name -> time.Time it was first listed
}

func (ms *models) of(name string) *model {
	if m, ok := ms.known.Load(name); ok {
		return m.(*model)
	}
	m, _ := ms.known.LoadOrStore(name, &model{name: name, metrics: ms.made(name)})
	return m.(*model)
}

// all are the metrics of the models that have been asked for, and of those named.
func (ms *models) all(names []string) (found []*modelMetrics) {
	for _, name := range names {
		ms.of(name)
	}
	ms.known.Range(func(_, m any) bool {
		found = append(found, m.(*model).metrics)
		return true
	})
	return found
}

func (ms *models) firstSeen(name string) int64 {
	at, _ := ms.created.LoadOrStore(name, time.Now())
	return at.(time.Time).Unix()
}

// correct scales an estimate of prompt tokens by what workers counted for this model so far.
func (m *model) correct(estimate uint64) uint64 {
	return uint64(math.Ceil(float64(estimate) * m.error.or(1)))
}

// learn takes in what a worker counted where we had estimated. One that counts wildly cannot
// move the estimate by more than a factor of 4.
func (m *model) learn(estimate, counted uint64) {
	if estimate > 0 && counted > 0 {
		m.error.observe(min(max(float64(counted)/float64(estimate), 0.25), 4))
	}
}

// modelEntry is one element of GET /v1/models.
type modelEntry struct {
	ID            string `json:"id"`
	Object        string `json:"object"`
	Created       int64  `json:"created"`
	OwnedBy       string `json:"owned_by"`
	MaxModelLen   uint64 `json:"max_model_len,omitempty"`
	ContextWindow uint64 `json:"context_window,omitempty"`
}

func (s *Server) listModels(c echo.Context) error {
	list := struct {
		Object string       `json:"object"`
		Data   []modelEntry `json:"data"`
	}{"list", []modelEntry{}}
	catalog := s.router.Catalog()
	healthy := s.healthy()
	for _, name := range catalog.Names() {
		if e, ok := s.entry(catalog, name, healthy); ok {
			list.Data = append(list.Data, e)
		}
	}
	return c.JSON(http.StatusOK, list)
}

// healthy is the set of workers that are not known to be down: inhibited ones will be back.
func (s *Server) healthy() map[worker.ID]bool {
	up := map[worker.ID]bool{}
	now := time.Now()
	s.router.Partitions("", func(p *router.Partition) {
		for _, st := range p.Busy.Workers(now) {
			up[st.ID] = st.State != busy.StateUnhealthy
		}
	})
	return up
}

// entry describes a model name; false if no worker that is up serves it.
func (s *Server) entry(catalog *worker.Catalog, name string, up map[worker.ID]bool) (modelEntry, bool) {
	e := modelEntry{ID: name, Object: "model", OwnedBy: "spillway"}
	found := false
	canonical, _ := catalog.Canonical(name)
	for _, w := range catalog.Workers() {
		// An operator's alias is no name that workers know; it stands for the canonical one.
		if !up[w.ID] || w.Models[0] != canonical || !w.Serves(name) && !catalog.IsAlias(name) {
			continue
		}
		found = true
		if w.MaxModelLen > 0 && (e.MaxModelLen == 0 || w.MaxModelLen < e.MaxModelLen) {
			e.MaxModelLen, e.ContextWindow = w.MaxModelLen, w.MaxModelLen
		}
	}
	if found {
		e.Created = s.models.firstSeen(name)
	}
	return e, found
}

// showModel serves GET /v1/models/{id} and, where no model has that very name, {id}/ready.
func (s *Server) showModel(c echo.Context) error {
	name := c.Param("*")
	if c.Request().URL.RawPath != "" { // then echo has matched, and cut, the escaped path
		var err error
		if name, err = url.PathUnescape(name); err != nil {
			return httperr.New(http.StatusBadRequest, "The path is not escaped correctly")
		}
	}
	catalog := s.router.Catalog()
	if _, ok := catalog.Canonical(name); !ok {
		if base, ok := strings.CutSuffix(name, "/ready"); ok {
			if canonical, ok := catalog.Canonical(base); ok {
				return s.modelReady(c, canonical)
			}
			name = base
		}
		return httperr.From(router.ErrUnknownModel, name, s.overload)
	}
	e, ok := s.entry(catalog, name, s.healthy())
	if !ok {
		return httperr.From(router.ErrNoWorkers, name, s.overload)
	}
	return c.JSON(http.StatusOK, e)
}

type readiness struct {
	Model      string         `json:"model"`
	Ready      bool           `json:"ready"`
	Workers    workerCounts   `json:"workers"`
	Thresholds thresholdsBody `json:"thresholds"`
	Detail     []workerDetail `json:"detail"`
}

type workerCounts struct {
	Registered int `json:"registered"`
	Routable   int `json:"routable"`
	Busy       int `json:"busy"`
	Free       int `json:"free"`
}

type workerDetail struct {
	Worker string     `json:"worker"`
	Tenant string     `json:"tenant,omitempty"` // left out for the default one
	State  busy.State `json:"state"`
	// What keeps it from being chosen beside load; left out where nothing does.
	Marked      bool   `json:"marked,omitempty"`       // refused a request for capacity a moment ago
	InhibitedMS int64  `json:"inhibited_ms,omitempty"` // for how much longer
	Circuit     string `json:"circuit,omitempty"`      // open or half-open

	Ranks []rankDetail `json:"ranks"`
}

type rankDetail struct {
	DP            uint32   `json:"dp_rank"`
	Busy          bool     `json:"busy"`
	Checks        []string `json:"checks,omitempty"` // those that make it busy
	DecodeBlocks  uint64   `json:"active_decode_blocks"`
	UsedBlocks    *uint64  `json:"kv_used_blocks,omitempty"`
	UsageRatio    *float64 `json:"kv_usage_ratio,omitempty"` // where blocks are not known
	TotalBlocks   uint64   `json:"kv_total_blocks,omitempty"`
	PrefillTokens uint64   `json:"active_prefill_tokens"`
	AgeMS         *int64   `json:"age_ms,omitempty"` // of the last report; left out before the first
	Stale         bool     `json:"stale,omitempty"`
}

// modelReady says why a model takes requests or does not. It answers 200 for every known model.
func (s *Server) modelReady(c echo.Context, name string) error {
	_, t, _ := s.router.Thresholds(name)
	r := readiness{Model: name, Thresholds: newThresholdsBody(t), Detail: []workerDetail{}}
	now := time.Now()
	s.router.Partitions(name, func(p *router.Partition) {
		snap := p.Busy.Snapshot()
		r.Workers.Registered += len(snap.Registered)
		r.Workers.Routable += len(snap.Routable)
		r.Workers.Busy += len(snap.Busy)
		r.Workers.Free += len(snap.Free)
		for _, st := range p.Busy.Workers(now) {
			r.Detail = append(r.Detail, s.newWorkerDetail(p.Key.Tenant, st))
		}
	})
	slices.SortFunc(r.Detail, func(a, b workerDetail) int { return strings.Compare(a.Worker, b.Worker) })
	r.Ready = r.Workers.Routable > 0
	return c.JSON(http.StatusOK, r)
}

func (s *Server) newWorkerDetail(tenant string, st busy.WorkerStatus) workerDetail {
	d := workerDetail{
		Worker: st.Name, State: st.State, Ranks: []rankDetail{},
		Marked: st.Marked, InhibitedMS: int64((st.Inhibited + time.Millisecond - 1) / time.Millisecond),
	}
	if p, ok := s.peers.Load(st.ID); ok {
		if state := p.(*peer).circuit.now(); state != gobreaker.StateClosed {
			d.Circuit = state.String()
		}
	}
	if tenant != worker.DefaultTenant {
		d.Tenant = tenant
	}
	for _, rk := range st.Ranks {
		rd := rankDetail{
			DP: rk.DP, Busy: rk.Checks.Busy(), Checks: rk.Checks.Names(), TotalBlocks: rk.Report.TotalBlocks,
			DecodeBlocks: uint64(rk.Report.DecodeBlocks), PrefillTokens: uint64(rk.Report.PrefillTokens), Stale: rk.Stale,
		}
		switch {
		case rk.Report.UsedKnown:
			rd.UsedBlocks = &rk.Report.UsedBlocks
		case rk.Sampled:
			rd.UsageRatio = &rk.Report.UsageRatio
		}
		if rk.Sampled {
			rd.AgeMS = new(rk.Age.Milliseconds())
		}
		d.Ranks = append(d.Ranks, rd)
	}
	return d
}
