package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"strings"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
)

// secret is what a client must know; the zero value asks for nothing. Only its hash is kept, so
// that comparing takes the same time whatever was sent, its length included.
type secret struct {
	set bool
	sum [sha256.Size]byte
}

func newSecret(text string) secret {
	return secret{text != "", sha256.Sum256([]byte(text))}
}

// is tells whether text is the secret.
func (k *secret) is(text string) bool {
	sum := sha256.Sum256([]byte(text))
	return subtle.ConstantTimeCompare(sum[:], k.sum[:]) == 1
}

// bearer is the token of an Authorization header, "" if there is none.
func bearer(h http.Header) string {
	scheme, token, _ := strings.Cut(first(h, "Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// knows tells whether a client may use the model routes: no API key is set, or it sends it, as
// OpenAI's clients do or, in X-Api-Key, as Anthropic's.
func (s *Server) knows(h http.Header) bool {
	return !s.apiKey.set || s.apiKey.is(bearer(h)) || s.apiKey.is(first(h, "X-Api-Key"))
}

func unauthorized() *httperr.Error {
	return httperr.New(http.StatusUnauthorized, "The API key is missing or wrong")
}

// keyed asks for the API key before a route that is not an inference route.
func (s *Server) keyed(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if !s.knows(c.Request().Header) {
			return unauthorized()
		}
		return next(c)
	}
}

// guarded asks for the admin token, if there is one, before a route that changes something.
func (s *Server) guarded(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if s.adminToken.set && !s.adminToken.is(bearer(c.Request().Header)) {
			c.Response().Header()["Www-Authenticate"] = bearerScheme
			return refuse(c, &adminError{http.StatusUnauthorized, "the admin token is missing or wrong"})
		}
		return next(c)
	}
}

var bearerScheme = []string{"Bearer"}

// warnOpen says at start which doors stand open to more than this machine.
func (s *Server) warnOpen(ln net.Listener, public bool) {
	var missing []string
	if public && !s.apiKey.set {
		missing = append(missing, "api-key")
	}
	if public == (s.cfg.AdminAddr == "") && !s.cfg.DisableAdminAPI && !s.adminToken.set {
		missing = append(missing, "admin-token")
	}
	if len(missing) > 0 && !loopback(ln.Addr()) {
		s.log.Warn("whoever can reach this address may use it: a secret is not set",
			"address", ln.Addr().String(), "unset", strings.Join(missing, ", "))
	}
}

// loopback tells whether only this machine can reach an address.
func loopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return !ok || tcp.IP.IsLoopback()
}
