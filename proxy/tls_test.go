package proxy_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"spillway/proxy"
)

// identity makes a certificate for this machine: its files, and who trusts it.
func identity(t *testing.T) (certPath, keyPath string, roots *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "spillway"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certPath, keyPath = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for path, block := range map[string][]byte{certPath: cert, keyPath: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})} {
		if err := os.WriteFile(path, block, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	roots = x509.NewCertPool()
	roots.AppendCertsFromPEM(cert)
	return certPath, keyPath, roots
}

// TestTLS speaks to both addresses through a real handshake, in both versions of HTTP.
func TestTLS(t *testing.T) {
	cert, key, roots := identity(t)
	for _, version := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(version, func(t *testing.T) {
			s := newScript(t, func(c *conn, r received) {
				switch {
				case strings.Contains(r.body, "break"):
					c.say(streamHead + chunk(hello))
					c.reset()
				case strings.Contains(r.body, `"stream":true`):
					streaming(role, hello, ended, done)(c, r)
				default:
					c.say(answer(200, jsonHeader, reply))
				}
			})
			f := begin(t, setup{proxy: func(c *proxy.Config) { apart(c); c.TLSCertPath, c.TLSKeyPath = cert, key }}, served("w", s))
			transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: version == "HTTP/2.0"}
			f.client = &http.Client{Transport: transport}
			f.url, f.adminURL = "https://"+f.addr, strings.Replace(f.adminURL, "http:", "https:", 1)

			resp, err := f.client.Get(f.url + "/live")
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.Proto != version || resp.TLS == nil {
				t.Errorf("spoke %s, want %s", resp.Proto, version)
			}
			f.chat(chatBody).is(t, "chat", 200, reply)
			f.chat(streamBody).is(t, "stream", 200, role+hello+ended+done)
			if got := s.seen()[0].header.Get("X-Forwarded-Proto"); got != "https" {
				t.Errorf("the worker got X-Forwarded-Proto %q, want https", got)
			}
			if g := f.chat(strings.Replace(streamBody, "Hi", "break", 1)); g.status != 200 || !strings.Contains(g.body, `{"error":{`) {
				t.Errorf("a broken stream = %d %s, want an error event", g.status, g.body)
			}
			f.chat(strings.Replace(chatBody, `"m"`, `"nope"`, 1)).is(t, "unknown model", 404, flat(404, "not_found", "Model not found: nope"))
			if g := f.chat(`{"model":"` + strings.Repeat("x", 2<<20)); g.status != 400 {
				t.Errorf("a long bad body = %d %.100s, want 400", g.status, g.body)
			}
			if g := f.operator("GET", "/metrics", ""); g.status != 200 {
				t.Errorf("metrics at the admin address = %d", g.status)
			}
		})
	}
}

func TestTLSFiles(t *testing.T) {
	cert, key, _ := identity(t)
	other, _, _ := identity(t)
	for _, tt := range []struct{ cert, key, want string }{
		{cert, key, ""},
		{cert, key + "x", "tls-key-path: "},
		{cert + "x", key, "tls-cert-path: "},
		{other, key, "tls-cert-path: "},
		{key, cert, "tls-cert-path: "},
	} {
		cfg := proxy.DefaultConfig()
		cfg.TLSCertPath, cfg.TLSKeyPath = tt.cert, tt.key
		switch err := cfg.Validate(); {
		case tt.want == "" && err != nil:
			t.Errorf("Validate of a pair = %v", err)
		case tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)):
			t.Errorf("Validate = %v, want an error that begins with %q", err, tt.want)
		}
	}
}
