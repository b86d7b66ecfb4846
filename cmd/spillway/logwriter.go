package main

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

// Bounds of what a log may hold back.
const (
	logPause = 50 * time.Millisecond // until a line is written
	logBytes = 32 << 10              // that wait
)

// lateWriter collects the lines of a busy log, so that a request does not pay for a system call
// of its own. It is safe for concurrent use.
type lateWriter struct {
	w io.Writer

	mu    sync.Mutex // guards the fields below; held while w is written, so that lines keep their order
	lines []byte     // not yet written
	late  *time.Timer
	armed bool // late will fire
}

// Write takes in one or more whole lines. What cannot be written is lost, as it is with any log
// whose reader has gone.
func (l *lateWriter) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines)+len(line) > logBytes {
		l.flushLocked()
	}
	l.lines = append(l.lines, line...)
	switch {
	case l.armed:
	case l.late == nil:
		l.late, l.armed = time.AfterFunc(logPause, l.flush), true
	default:
		l.armed = true
		l.late.Reset(logPause)
	}
	return len(line), nil
}

// flush writes what waits.
func (l *lateWriter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.armed {
		l.armed = false
		l.late.Stop()
	}
	l.flushLocked()
}

func (l *lateWriter) flushLocked() {
	if len(l.lines) > 0 {
		_, _ = l.w.Write(l.lines) // where would one say that the log is broken?
		l.lines = l.lines[:0]
	}
}

// promptHandler is a handler over a lateWriter that holds back nothing more serious than info:
// what an operator must see is not lost if the process dies.
type promptHandler struct {
	slog.Handler
	out *lateWriter
}

// Handle writes the record, and if it is serious all that waits with it.
func (h promptHandler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	if r.Level > slog.LevelInfo {
		h.out.flush()
	}
	return err
}

// WithAttrs is that of the handler, as prompt as before.
func (h promptHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return promptHandler{h.Handler.WithAttrs(attrs), h.out}
}

// WithGroup is that of the handler, as prompt as before.
func (h promptHandler) WithGroup(name string) slog.Handler {
	return promptHandler{h.Handler.WithGroup(name), h.out}
}
