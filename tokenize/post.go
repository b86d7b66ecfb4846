package tokenize

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"sync"

	"spillway/upstream"
)

// letter is a call's body and the answer's. Its memory is used again.
type letter struct {
	body, answer []byte
	head         []byte
	request      upstream.Request
	response     upstream.Response
}

var letters = sync.Pool{New: func() any { return new(letter) }}

const (
	answerBytes        = 1 << 20 // room for what a template adds
	answerBytesPerByte = 12      // and for a token of each byte that was sent
	keptBytes          = 1 << 20 // larger ones are left to the garbage collector
	errorBytes         = 64 << 10
	firstRoom          = 256 << 10 // at most, whatever an answer says of its length
	readRoom           = 16 << 10
)

// limit is how long an answer may be.
func (l *letter) limit() int { return answerBytes + answerBytesPerByte*len(l.body) }

// release gives the letter back. What was made of the answer must not be part of it.
func (l *letter) release() {
	if cap(l.body) <= keptBytes && cap(l.answer) <= keptBytes {
		l.request, l.response = upstream.Request{}, upstream.Response{}
		letters.Put(l)
	}
}

// link is the connections to one worker, none of which a request of a client waits for.
type link struct {
	endpoint string
	client   *upstream.Client
}

// connect returns the connections to a worker, which may have another endpoint than before.
func (s *server) connect(w *Worker) (*upstream.Client, error) {
	was := s.link.Load()
	if was != nil && was.endpoint == w.Endpoint {
		return was.client, nil
	}
	u, err := url.Parse(w.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("tokenize: %w", err)
	}
	c, err := upstream.New(u, upstream.Config{DialTimeout: mediaTimeout, MaxIdle: maxCalls})
	if err != nil {
		return nil, fmt.Errorf("tokenize: %w", err)
	}
	if old := s.link.Swap(&link{w.Endpoint, c}); old != nil {
		old.client.Close() // calls that are under way go on
	}
	return c, nil
}

// disconnect closes the connections that nobody uses.
func (s *server) disconnect() {
	if l := s.link.Load(); l != nil {
		l.client.Close()
	}
}

// post sends l.body to a worker, in the caller's goroutine, and leaves what it answers in l.answer:
// no more than one byte beyond the limit, and of an error no more than keeps the connection in use.
func (s *server) post(ctx context.Context, w *Worker, path string, l *letter) (status int, err error) {
	client, err := s.connect(w)
	if err != nil {
		return 0, err
	}
	l.head = append(l.head[:0], "Content-Type: application/json\r\nUser-Agent: spillway\r\n"...)
	if w.APIKey != "" {
		l.head = upstream.AppendHeader(l.head, "Authorization", "Bearer "+w.APIKey)
	}
	l.request = upstream.Request{Method: "POST", Path: path, Head: l.head, Body: l.body}
	if err := client.DoInto(ctx, &l.request, &l.response); err != nil {
		return 0, err
	}
	defer l.response.Close()
	limit := l.limit() + 1
	if statusResult(l.response.Status) != told {
		limit = errorBytes
	}
	return l.response.Status, l.read(limit)
}

// read reads an answer, up to a number of bytes. It comes from the socket to where it stays, if its
// length was told.
func (l *letter) read(limit int) error {
	l.answer = slices.Grow(l.answer[:0], readRoom+int(min(max(l.response.ContentLength, 0), firstRoom)))
	for len(l.answer) < limit {
		if cap(l.answer)-len(l.answer) < readRoom {
			l.answer = slices.Grow(l.answer, len(l.answer))
		}
		n, err := l.response.Read(l.answer[len(l.answer):min(cap(l.answer), limit)])
		l.answer = l.answer[:len(l.answer)+n]
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
	return nil
}
