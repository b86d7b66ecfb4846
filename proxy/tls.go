package proxy

import (
	"crypto/tls"
	"fmt"
	"os"
)

// certificate reads the pair of files that TLS is served with, nil if none is configured. Its
// error begins with the key of the setting that is wrong.
func (c Config) certificate() (*tls.Config, error) {
	switch {
	case c.TLSCertPath == "" && c.TLSKeyPath == "":
		return nil, nil
	case c.TLSCertPath == "":
		return nil, fmt.Errorf("tls-cert-path: is missing beside tls-key-path")
	case c.TLSKeyPath == "":
		return nil, fmt.Errorf("tls-key-path: is missing beside tls-cert-path")
	}
	cert, err := os.ReadFile(c.TLSCertPath)
	if err != nil {
		return nil, fmt.Errorf("tls-cert-path: %w", err)
	}
	key, err := os.ReadFile(c.TLSKeyPath)
	if err != nil {
		return nil, fmt.Errorf("tls-key-path: %w", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("tls-cert-path: %s and %s are no certificate and its key: %w", c.TLSCertPath, c.TLSKeyPath, err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}, nil
}
