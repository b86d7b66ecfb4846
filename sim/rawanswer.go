package sim

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
)

// rawAnswer writes an answer in chunks, with a head of its own.
type rawAnswer struct {
	conn    net.Conn
	header  http.Header
	lines   string // of the head
	started bool
	err     error // the first one of the connection
}

// Header is what the head will say beside lines.
func (a *rawAnswer) Header() http.Header { return a.header }

// WriteHeader writes the head.
func (a *rawAnswer) WriteHeader(status int) {
	if a.started {
		return
	}
	a.started = true
	var head bytes.Buffer
	fmt.Fprintf(&head, "HTTP/1.1 %d %s\r\n%sTransfer-Encoding: chunked\r\n", status, http.StatusText(status), a.lines)
	_ = a.header.Write(&head) // a bytes.Buffer takes everything
	head.WriteString("\r\n")
	a.send(head.Bytes())
}

// Write writes p as a chunk.
func (a *rawAnswer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if len(p) > 0 {
		a.send(fmt.Appendf(nil, "%x\r\n%s\r\n", len(p), p))
	}
	return len(p), a.err
}

// FlushError writes the head if nothing has been written; all else has been.
func (a *rawAnswer) FlushError() error {
	a.WriteHeader(http.StatusOK)
	return a.err
}

func (a *rawAnswer) end() {
	a.WriteHeader(http.StatusOK)
	a.send([]byte("0\r\n\r\n"))
}

func (a *rawAnswer) send(p []byte) {
	if a.err == nil {
		_, a.err = a.conn.Write(p)
	}
}
