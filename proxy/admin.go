package proxy

import (
	"errors"
	"io"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/labstack/echo/v4"
)

// adminError is an error body of the admin routes: {"error": text}.
type adminError struct {
	status int
	text   string
}

func refuse(c echo.Context, e *adminError) error {
	return c.JSON(e.status, map[string]string{"error": e.text})
}

// operate adds the routes of those who run the server.
func (s *Server) operate(t *routeTable) {
	t.add(http.MethodGet, s.cfg.MetricsPath, s.quiet(s.exposition()))
	t.add(http.MethodGet, "/internal/capacity", s.quiet(s.showCapacity))
	if s.cfg.DisableAdminAPI {
		return
	}
	t.add(http.MethodGet, "/busy_threshold", s.showThresholds)
	t.add(http.MethodPost, "/busy_threshold", s.guarded(s.setThresholds))
	t.add(http.MethodDelete, "/busy_threshold", s.guarded(s.clearThresholds))
}

// administer adds the routes that exist only on the admin address. Profiles are behind the admin
// token too: one of them is the command line, where the token may stand.
func (s *Server) administer(t *routeTable) {
	if !s.cfg.DisableAdminAPI {
		t.add(http.MethodGet, "/workers", s.listWorkers)
		t.add(http.MethodPost, "/workers", s.guarded(s.setWorker))
		t.add(http.MethodGet, "/workers/:id", s.showWorker)
		t.add(http.MethodPatch, "/workers/:id", s.guarded(s.patchWorker))
		t.add(http.MethodDelete, "/workers/:id", s.guarded(s.removeWorker))
	}
	profiles := map[string]http.HandlerFunc{
		"/debug/pprof/cmdline": pprof.Cmdline, "/debug/pprof/profile": pprof.Profile,
		"/debug/pprof/symbol": pprof.Symbol, "/debug/pprof/trace": pprof.Trace, "/debug/pprof/*": pprof.Index,
	}
	for path, h := range profiles {
		t.add(http.MethodGet, path, s.guarded(echo.WrapHandler(h)))
	}
}

// Mount has h answer GET and POST at a pattern such as /internal/x/*, at the admin address if there is one.
// h asks for credentials itself. A body may take ClientReadTimeout. To be called before Run.
func (s *Server) Mount(pattern string, h http.Handler) error {
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		s.operators.add(method, pattern, s.quiet(func(c echo.Context) error {
			if req := c.Request(); req.ContentLength != 0 {
				rc := http.NewResponseController(c.Response().Writer)
				_ = rc.SetReadDeadline(time.Now().Add(s.cfg.ClientReadTimeout)) // see readSmall
				req.Body = timedBody{req.Body, rc}
			}
			h.ServeHTTP(c.Response(), c.Request())
			return nil
		}))
	}
	return s.operators.err
}

// timedBody is a body with a deadline, which must not hit who waits for the answer.
type timedBody struct {
	io.ReadCloser
	conn *http.ResponseController
}

// Read ends the deadline with the body.
func (b timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.conn.SetReadDeadline(time.Time{})
	}
	return n, err
}

// readSmall reads the JSON body of an admin route, of at most limit bytes.
func (s *Server) readSmall(c echo.Context, limit int64, tooLarge string) ([]byte, *adminError) {
	if !jsonContent(c.Request().Header.Get("Content-Type")) {
		return nil, &adminError{http.StatusUnsupportedMediaType, "Content-Type must be application/json"}
	}
	rc := http.NewResponseController(c.Response().Writer)
	// Not supported by recorders in tests. The deadline ends with the request: net/http sets
	// that of the next one itself.
	_ = rc.SetReadDeadline(time.Now().Add(s.cfg.ClientReadTimeout))
	raw, err := io.ReadAll(http.MaxBytesReader(c.Response().Writer, c.Request().Body, limit))
	_ = rc.SetReadDeadline(time.Time{})
	if err == nil {
		return raw, nil
	}
	if large := (*http.MaxBytesError)(nil); errors.As(err, &large) {
		return nil, &adminError{http.StatusRequestEntityTooLarge, tooLarge}
	}
	return nil, &adminError{http.StatusBadRequest, "the body could not be read"}
}
