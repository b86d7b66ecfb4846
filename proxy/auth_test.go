package proxy_test

import (
	"strings"
	"testing"

	"spillway/proxy"
)

const refusedKey = "The API key is missing or wrong"

// TestAPIKey checks who may use which route once there is a key, and that the key ends here.
func TestAPIKey(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.APIKey = "sesame" }}, served("w", s))
	for _, tt := range []struct {
		name    string
		headers []string
		ok      bool
	}{
		{"no key", nil, false},
		{"bearer", []string{"Authorization: Bearer sesame"}, true},
		{"the scheme in small letters", []string{"Authorization: bearer sesame"}, true},
		{"as Anthropic's clients do", []string{"X-Api-Key: sesame"}, true},
		{"one of both is right", []string{"Authorization: Bearer other", "X-Api-Key: sesame"}, true},
		{"wrong", []string{"Authorization: Bearer sesam"}, false},
		{"longer", []string{"Authorization: Bearer sesame1"}, false},
		{"another scheme", []string{"Authorization: Basic sesame"}, false},
		{"no scheme", []string{"Authorization: sesame"}, false},
		{"empty bearer", []string{"Authorization: Bearer "}, false},
		{"wrong x-api-key", []string{"X-Api-Key: open"}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := len(s.seen())
			for _, path := range []string{"/v1/chat/completions", "/v1/models", "/v1/models/m", "/v1/models/m/ready", "/v1/models/nope"} {
				method, body := "GET", ""
				if strings.HasSuffix(path, "completions") {
					method, body = "POST", chatBody
				}
				g := f.send(method, path, body, tt.headers...)
				switch {
				case tt.ok && g.status != 200 && path != "/v1/models/nope":
					t.Errorf("%s %s = %d %s, want 200", method, path, g.status, g.body)
				case !tt.ok:
					g.is(t, method+" "+path, 401, flat(401, "unauthorized", refusedKey), "Www-Authenticate: Bearer")
				}
			}
			for _, r := range s.seen()[before:] {
				if r.header.Get("Authorization")+r.header.Get("X-Api-Key") != "" {
					t.Errorf("the worker was given %v", r.header)
				}
			}
		})
	}
	for path, want := range map[string]int{
		"/health": 200, "/live": 200, "/ready": 200, "/metrics": 200, "/openapi.json": 200, "/docs": 200, "/busy_threshold": 200, "/v1/nope": 404,
	} {
		if g := f.send("GET", path, ""); g.status != want {
			t.Errorf("GET %s without a key = %d, want %d", path, g.status, want)
		}
	}
	// What a request cannot be used for is told before who may use it; what it says, after.
	f.send("GET", "/v1/chat/completions", "").is(t, "a wrong method", 405, flat(405, "method_not_allowed", "Method GET is not allowed on /v1/chat/completions"))
	f.chat("{").is(t, "a bad body without a key", 401, flat(401, "unauthorized", refusedKey))
}

// TestCredentialsForwarded checks which credentials a worker sees.
func TestCredentialsForwarded(t *testing.T) {
	for _, tt := range []struct {
		name        string
		key, own    string // ours, and the worker's
		forward     *bool
		auth, xauth string // as the worker gets them
	}{
		{name: "no key of ours", auth: "Bearer sesame", xauth: "k"},
		{name: "no key of ours, switched off", forward: new(false)},
		{name: "our key", key: "sesame"},
		{name: "our key, switched on", key: "sesame", forward: new(true), auth: "Bearer sesame", xauth: "k"},
		{name: "the worker's own key", own: "w", auth: "Bearer w"},
		{name: "both keys, switched on", key: "sesame", own: "w", forward: new(true), auth: "Bearer w"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, saying(answer(200, jsonHeader, reply)))
			w := served("w", s)
			w.APIKey = tt.own
			f := begin(t, setup{proxy: func(c *proxy.Config) { c.APIKey, c.ForwardAuth = tt.key, tt.forward }}, w)
			f.chat(chatBody, "Authorization: Bearer sesame", "X-Api-Key: k").is(t, "chat", 200, reply)
			h := s.seen()[0].header
			if a, x := h.Get("Authorization"), h.Get("X-Api-Key"); a != tt.auth || x != tt.xauth {
				t.Errorf("the worker got Authorization %q and X-Api-Key %q, want %q and %q", a, x, tt.auth, tt.xauth)
			}
		})
	}
}

// operator sends a request to the admin address.
func (f *front) operator(method, path, body string, headers ...string) got {
	f.t.Helper()
	at := *f
	at.url = f.adminURL
	return at.send(method, path, body, headers...)
}

func apart(c *proxy.Config) { c.AdminAddr = "127.0.0.1:0" }

const setBody = `{"model":"m","active_prefill_tokens_threshold":7}`

// TestAdminToken checks what the token guards, on one address and on two.
func TestAdminToken(t *testing.T) {
	for _, second := range []bool{false, true} {
		f := begin(t, setup{models: []string{"m"}, proxy: func(c *proxy.Config) {
			c.AdminToken, c.APIKey = "open", "sesame"
			if second {
				apart(c)
			}
		}})
		send := f.send
		if second {
			send = f.operator
		}
		for _, tt := range []struct {
			method, path, body string
			guarded            bool
		}{
			{"GET", "/busy_threshold", "", false},
			{"GET", "/metrics", "", false},
			{"GET", "/openapi.json", "", false},
			{"POST", "/busy_threshold", setBody, true},
			{"POST", "/busy_threshold", `{"model":"m"}`, true},
			{"DELETE", "/busy_threshold?model=m", "", true},
		} {
			for header, right := range map[string]bool{
				"Authorization: Bearer open": true, "Authorization: Bearer sesame": false, "X-Api-Key: open": false, "X-None: x": false,
			} {
				g := send(tt.method, tt.path, tt.body, header)
				switch {
				case right || !tt.guarded:
					if g.status != 200 {
						t.Errorf("two addresses %v: %s %s with %s = %d %s, want 200", second, tt.method, tt.path, header, g.status, g.body)
					}
				default:
					g.is(t, tt.method+" "+tt.path+" with "+header, 401, `{"error":"the admin token is missing or wrong"}`+"\n", "Www-Authenticate: Bearer")
				}
			}
		}
	}
}

// TestAdminAddress checks what is where once there are two addresses.
func TestAdminAddress(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: func(c *proxy.Config) { apart(c); c.AdminToken = "open" }}, served("w", s))
	f.chat(chatBody).is(t, "chat", 200, reply)
	for path, want := range map[string]struct{ public, admin int }{
		"/busy_threshold": {404, 200}, "/metrics": {404, 200}, "/openapi.json": {200, 200}, "/v1/models": {200, 404},
		"/health": {200, 404}, "/live": {200, 404}, "/debug/pprof/": {404, 401}, "/debug/pprof/cmdline": {404, 401},
	} {
		public, admin := f.send("GET", path, ""), f.operator("GET", path, "")
		if public.status != want.public || admin.status != want.admin {
			t.Errorf("GET %s = %d, at the admin address %d; want %d and %d", path, public.status, admin.status, want.public, want.admin)
		}
	}
	f.send("GET", "/metrics", "").is(t, "metrics at the clients' address", 404, flat(404, "not_found", "No route for GET /metrics"))
	if g := f.operator("GET", "/debug/pprof/heap?debug=1", "", "Authorization: Bearer open"); g.status != 200 || !strings.HasPrefix(g.body, "heap profile") {
		t.Errorf("the heap profile = %d %.100s", g.status, g.body)
	}
	if g := f.send("GET", "/openapi.json", ""); strings.Contains(g.body, "busy_threshold") {
		t.Error("the clients' document lists what is elsewhere")
	}
	if g := f.operator("GET", "/openapi.json", ""); !strings.Contains(g.body, "busy_threshold") || strings.Contains(g.body, "/v1/") {
		t.Errorf("the admin address lists %s", g.body)
	}
}

// TestWarnings checks which doors the log says stand open.
func TestWarnings(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*proxy.Config)
		host   string
		want   string // "" is no warning
	}{
		{"loopback", func(*proxy.Config) {}, "127.0.0.1", ""},
		{"everything open", func(*proxy.Config) {}, "0.0.0.0", `unset="api-key, admin-token"`},
		{"no admin token", func(c *proxy.Config) { c.APIKey = "k" }, "0.0.0.0", "unset=admin-token"},
		{"no admin API", func(c *proxy.Config) { c.APIKey, c.DisableAdminAPI = "k", true }, "0.0.0.0", ""},
		{"admin elsewhere", func(c *proxy.Config) { apart(c); c.APIKey = "k" }, "0.0.0.0", ""},
		{"admin elsewhere, no key", apart, "0.0.0.0", "unset=api-key"},
		{"admin open", func(c *proxy.Config) { c.AdminAddr = "0.0.0.0:0" }, "127.0.0.1", "unset=admin-token"},
		{"all set", func(c *proxy.Config) { c.APIKey, c.AdminToken, c.AdminAddr = "k", "t", "0.0.0.0:0" }, "0.0.0.0", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := &lines{}
			f := begin(t, setup{log: log.logger(), host: tt.host, proxy: tt.change})
			f.send("GET", "/live", "")
			switch text := log.String(); {
			case tt.want == "" && strings.Contains(text, "level=WARN"):
				t.Errorf("logged %s, want no warning", text)
			case tt.want != "" && !(strings.Contains(text, "level=WARN") && strings.Contains(text, tt.want)):
				t.Errorf("logged %s, want a warning with %s", text, tt.want)
			}
		})
	}
}

func TestSecretsValidate(t *testing.T) {
	for _, tt := range []struct {
		change func(*proxy.Config)
		want   string // the key that the error begins with
	}{
		{func(c *proxy.Config) { c.APIKey = "two words" }, "api-key: "},
		{func(c *proxy.Config) { c.AdminToken = "schlüssel" }, "admin-token: "},
		{func(c *proxy.Config) { c.AdminAddr = "9100" }, "admin-addr: "},
		{func(c *proxy.Config) { c.AdminAddr = "localhost:x" }, "admin-addr: "},
		{func(c *proxy.Config) { c.TLSCertPath = "a" }, "tls-key-path: "},
		{func(c *proxy.Config) { c.TLSKeyPath = "a" }, "tls-cert-path: "},
		{func(c *proxy.Config) { c.TLSCertPath, c.TLSKeyPath = "/nowhere", "/nowhere" }, "tls-cert-path: "},
	} {
		cfg := proxy.DefaultConfig()
		tt.change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("Validate = %v, want an error that begins with %q", err, tt.want)
		} else if strings.Contains(err.Error(), "words") || strings.Contains(err.Error(), "schl") {
			t.Errorf("Validate = %v tells a secret", err)
		}
	}
}
