package proxy

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"spillway/upstream"
)

// plainWriter writes the answer to a plain request, as net/http's writer would: what is written goes
// out when it is flushed or becomes much, in chunks unless its length was told. It belongs to the
// goroutine of its connection.
type plainWriter struct {
	t       *plainTalk
	header  http.Header
	status  int   // 0: not told
	began   bool  // the head is in out, or has gone
	bare    bool  // the answer has no body
	chunked bool  // it goes out in chunks
	closes  bool  // the connection ends with it
	length  int64 // that was told; -1 is none
	written int64 // bytes of the body
	out     *[]byte
	err     error // of the connection
}

// plainOut is how much of an answer is held back until it is flushed, in bytes.
const plainOut = 8 << 10

var plainOuts = sync.Pool{New: func() any { b := make([]byte, 0, 2<<10); return &b }}

func (w *plainWriter) reset() {
	clear(w.header)
	w.status, w.began, w.bare, w.chunked, w.closes, w.length, w.written, w.err = 0, false, false, false, false, -1, 0, nil
}

// Header is http.ResponseWriter's.
func (w *plainWriter) Header() http.Header { return w.header }

// WriteHeader is http.ResponseWriter's; answers that only announce another one are left out.
func (w *plainWriter) WriteHeader(status int) {
	if w.status == 0 && status >= 200 {
		w.status = status
	}
}

// Write is http.ResponseWriter's.
func (w *plainWriter) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, w.err
	}
	w.begin(p, false)
	switch {
	case w.err != nil:
		return 0, w.err
	case w.bare:
		return 0, http.ErrBodyNotAllowed
	}
	if w.written += int64(len(p)); w.length >= 0 && w.written > w.length {
		return 0, http.ErrContentLength
	}
	b := *w.out
	switch {
	case w.chunked:
		b = strconv.AppendUint(b, uint64(len(p)), 16)
		b = append(b, "\r\n"...)
		b = append(b, p...)
		b = append(b, "\r\n"...)
	case len(p) > plainOut: // no need to copy it
		if w.FlushError() == nil {
			_, w.err = w.t.c.Write(p)
		}
		return len(p), w.err
	default:
		b = append(b, p...)
	}
	if *w.out = b; len(b) > plainOut {
		return len(p), w.FlushError()
	}
	return len(p), nil
}

// FlushError sends what has been written.
func (w *plainWriter) FlushError() error {
	w.begin(nil, false)
	if len(*w.out) > 0 && w.err == nil {
		_, w.err = w.t.c.Write(*w.out)
	}
	if cap(*w.out) <= keptFrame {
		*w.out = (*w.out)[:0]
		plainOuts.Put(w.out)
	}
	w.out = nil
	return w.err
}

// Flush is http.Flusher's.
func (w *plainWriter) Flush() { _ = w.FlushError() }

// SetReadDeadline and SetWriteDeadline are for an http.ResponseController.
func (w *plainWriter) SetReadDeadline(at time.Time) error { return w.t.c.SetReadDeadline(at) }

// SetWriteDeadline counts instead of the bound of each write.
func (w *plainWriter) SetWriteDeadline(at time.Time) error { return w.t.c.SetWriteDeadline(at) }

// finish sends what is left of an answer. It reports whether the connection can be used again.
func (w *plainWriter) finish() bool {
	w.begin(nil, true)
	if w.chunked {
		*w.out = append(*w.out, "0\r\n\r\n"...)
	}
	if w.FlushError(); w.length >= 0 && w.written != w.length {
		return false // the client would take the next answer for the rest of this one
	}
	return w.err == nil && !w.closes
}

// begin writes the head, if that has not been done. The body begins with some bytes, or is empty if it
// is over.
func (w *plainWriter) begin(body []byte, over bool) {
	if w.out == nil {
		w.out = plainOuts.Get().(*[]byte)
	}
	if w.began {
		return
	}
	w.began = true
	if w.status == 0 {
		w.status = http.StatusOK
	}
	h := w.header
	w.bare = w.status == http.StatusNoContent || w.status == http.StatusNotModified
	if told := h["Content-Length"]; len(told) > 0 && !w.bare {
		if n, err := strconv.ParseInt(told[0], 10, 64); err == nil && n >= 0 {
			w.length = n
		}
	}
	if w.length < 0 && over {
		w.length = 0
	}
	w.chunked = w.length < 0 && !w.bare
	if len(body) > 0 && len(h["Content-Type"]) == 0 && len(h["Content-Encoding"]) == 0 {
		h["Content-Type"] = []string{http.DetectContentType(body)}
	}
	w.closes = slices.ContainsFunc(h["Connection"], func(v string) bool { return strings.EqualFold(v, "close") })
	told := w.closes
	w.closes = w.closes || !w.t.skip() || stage(w.t.p.s.stage.Load()) == stopping
	*w.out = w.appendHead(*w.out, w.closes && !told)
}

// appendHead appends the status line and the fields in the order of their names.
func (w *plainWriter) appendHead(b []byte, closes bool) []byte {
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(w.status), 10)
	b = append(b, ' ')
	if text := http.StatusText(w.status); text != "" {
		b = append(b, text...)
	} else {
		b = append(b, "status code "...)
		b = strconv.AppendInt(b, int64(w.status), 10)
	}
	b = append(b, '\r', '\n')
	var room [24]string
	names := room[:0]
	for name := range w.header {
		names = append(names, name)
	}
	slices.Sort(names)
	told := false // how long it is
	for _, name := range names {
		switch name {
		case "Transfer-Encoding", "Date":
			continue
		case "Content-Length":
			if told = w.length >= 0; !told {
				continue
			}
		case "Content-Type":
			if w.status == http.StatusNotModified {
				continue
			}
		}
		for _, value := range w.header[name] {
			b = upstream.AppendHeader(b, name, value)
		}
	}
	b = append(b, "Date: "...)
	b = append(b, dateNow()...)
	switch {
	case w.chunked:
		b = append(b, "\r\nTransfer-Encoding: chunked"...)
	case !w.bare && !told:
		b = append(b, "\r\nContent-Length: "...)
		b = strconv.AppendInt(b, w.length, 10)
	}
	if closes {
		b = append(b, "\r\nConnection: close"...)
	}
	return append(b, "\r\n\r\n"...)
}

// date is a second as HTTP writes it.
type date struct {
	second int64
	text   string
}

var lastDate atomic.Pointer[date]

func dateNow() string {
	now := time.Now()
	if d := lastDate.Load(); d != nil && d.second == now.Unix() {
		return d.text
	}
	d := &date{now.Unix(), now.UTC().Format(http.TimeFormat)}
	lastDate.Store(d)
	return d.text
}
