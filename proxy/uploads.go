package proxy

import (
	"net/http"
	"sync"
	"time"
)

// upload is a request whose body is being read. It is part of its exchange.
type upload struct {
	conn       http.ResponseController
	prev, next *upload // guarded by uploads.mu; nil when not in the list
}

// uploads lists the requests whose body is being read, so that those who wait for bytes can be
// told when the process stops. net/http would leave them to wait: it looks after a connection
// only once a body has been read.
type uploads struct {
	mu   sync.Mutex
	head upload // of a ring
}

func (l *uploads) init() { l.head.prev, l.head.next = &l.head, &l.head }

func (l *uploads) add(u *upload) {
	l.mu.Lock()
	u.prev, u.next = l.head.prev, &l.head
	u.prev.next, u.next.prev = u, u
	l.mu.Unlock()
}

func (l *uploads) remove(u *upload) {
	l.mu.Lock()
	u.prev.next, u.next.prev = u.next, u.prev
	u.prev, u.next = nil, nil
	l.mu.Unlock()
}

// wake ends all waiting. Contexts must have been cancelled before: who sets a deadline of its own
// looks at its context afterwards.
func (l *uploads) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for u := l.head.next; u != &l.head; u = u.next {
		_ = u.conn.SetReadDeadline(time.Unix(1, 0)) // one that is gone need not be woken
	}
}
