package jsonhttp

import (
	"crypto/sha256"
	"crypto/subtle"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"spillway/httperr"
)

// Route is one method of one path.
type Route struct {
	Method string // GET answers HEAD too
	Path   string // a segment {id} stands for any that is not empty; r.PathValue("id") has it decoded
	Public bool   // no API key is asked for
	Serve  func(w http.ResponseWriter, r *http.Request) *httperr.Error
}

// Routes is the handler of a service. It finds the route of a request by its exact path, without
// the redirects of http.ServeMux, asks for the API key, writes what has failed, counts and times.
type Routes struct {
	exact   map[string]*resource
	varying []*resource
	key     [sha256.Size]byte
	locked  bool // there is an API key
	metrics *Metrics
	log     *slog.Logger
}

// resource is one path with its methods.
type resource struct {
	path           string
	before, behind string // what surrounds {id}, if there is one
	methods        []Route
	allow          string
}

// NewRoutes returns the handler for routes and GET /metrics, which serves reg. Metrics whose names
// begin with prefix are registered with reg. An empty API key lets everybody in.
func NewRoutes(prefix, apiKey string, routes []Route, reg *prometheus.Registry, log *slog.Logger) *Routes {
	page := promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	routes = append(routes, Route{http.MethodGet, "/metrics", true, func(w http.ResponseWriter, r *http.Request) *httperr.Error {
		page.ServeHTTP(w, r)
		return nil
	}})
	rs := &Routes{exact: map[string]*resource{}, key: sha256.Sum256([]byte(apiKey)), locked: apiKey != "", log: log}
	var paths []string
	all := map[string]*resource{}
	for _, route := range routes {
		at := all[route.Path]
		if at == nil {
			at = &resource{path: route.Path}
			all[route.Path] = at
			paths = append(paths, route.Path)
			var varies bool
			if at.before, at.behind, varies = strings.Cut(route.Path, "{id}"); varies {
				rs.varying = append(rs.varying, at)
			} else {
				rs.exact[route.Path] = at
			}
		}
		at.methods = append(at.methods, route)
		if at.allow != "" {
			at.allow += ","
		}
		if at.allow += route.Method; route.Method == http.MethodGet {
			at.allow += ",HEAD"
		}
	}
	rs.metrics = NewMetrics(reg, prefix, paths)
	return rs
}

// ServeHTTP implements http.Handler.
func (rs *Routes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	at, path := rs.find(r), ""
	if at != nil {
		path = at.path
	}
	told := Tell(w)
	if failed := rs.serve(told, r, at); failed != nil {
		Send(told, failed.Status, AppendError(nil, failed))
		if failed.Detail != nil && failed.Status >= 500 { // the client was not told all
			rs.log.Error("request failed", "path", path, "err", failed)
		}
	}
	rs.metrics.Answered(path, told.Status, time.Since(start))
}

// find returns what a request is about, or nil. An escape where none is needed makes another path.
func (rs *Routes) find(r *http.Request) *resource {
	if r.URL.RawPath == "" {
		if at := rs.exact[r.URL.Path]; at != nil {
			return at
		}
	}
	path := r.URL.EscapedPath()
	for _, at := range rs.varying {
		rest, ok := strings.CutPrefix(path, at.before)
		if !ok {
			continue
		}
		segment, ok := strings.CutSuffix(rest, at.behind)
		if !ok || segment == "" || strings.Contains(segment, "/") {
			continue
		}
		if id, err := url.PathUnescape(segment); err == nil {
			r.SetPathValue("id", id)
			return at
		}
	}
	return nil
}

var (
	errNoRoute      = httperr.New(http.StatusNotFound, "route not found")
	errMethod       = httperr.New(http.StatusMethodNotAllowed, "method not allowed")
	errUnauthorized = httperr.New(http.StatusUnauthorized, "the API key is missing or wrong")
)

func (rs *Routes) serve(w http.ResponseWriter, r *http.Request, at *resource) *httperr.Error {
	if at == nil {
		return errNoRoute
	}
	for i := range at.methods {
		route := &at.methods[i]
		if r.Method != route.Method && !(r.Method == http.MethodHead && route.Method == http.MethodGet) {
			continue
		}
		if !route.Public && !rs.admits(r) {
			return errUnauthorized
		}
		return route.Serve(w, r)
	}
	w.Header()["Allow"] = []string{at.allow}
	return errMethod
}

// admits tells whether a request has the API key, if one is set.
func (rs *Routes) admits(r *http.Request) bool {
	if !rs.locked {
		return true
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	sum := sha256.Sum256([]byte(strings.TrimSpace(token)))
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(sum[:], rs.key[:]) == 1
}

// Exchange is the memory that reading a body and writing an answer take; it is used again for
// others.
type Exchange struct {
	Out  []byte // the answer, if there is more to say than ok
	body []byte
	d    Decoder
}

// ReadObject reads the body of r, which has up to most bytes, into to.
func ReadObject[R any](x *Exchange, r *http.Request, most int, fields []Field[R], to *R) *httperr.Error {
	if failed := CheckType(r); failed != nil {
		return failed
	}
	var failed *httperr.Error
	if x.body, failed = ReadBody(x.body, r, most); failed != nil {
		return failed
	}
	x.d.Reset(x.body)
	return Object(&x.d, fields, to)
}

// Answer writes the answer.
func (x *Exchange) Answer(w http.ResponseWriter, status int) {
	if len(x.Out) > 0 {
		Send(w, status, x.Out)
	} else {
		Send(w, status, OK)
	}
}

// Clear makes x ready for another request. It reports false if x has grown beyond most bytes and is
// better not kept.
func (x *Exchange) Clear(most int) bool {
	x.Out = x.Out[:0]
	x.d.Reset(nil)
	return cap(x.body) <= most && cap(x.Out) <= most
}
