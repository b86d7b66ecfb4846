package monitor

import (
	"context"
	"time"

	"github.com/zeebo/xxh3"

	"spillway/worker"
)

// Who is at the other end of a connection that takes the place of an earlier one.
const (
	kvSame    = "same"    // the process that was heard before
	kvAnew    = "anew"    // another process, whose cache began empty
	kvUnknown = "unknown" // nobody can be asked, or no answer came
)

const (
	maxKVChecks  = 8           // that go without an answer
	firstKVCheck = time.Second // from one of them to the next; doubled each time
	restartHolds = time.Minute // between the news that a worker began anew and its new connection
)

// kvLink is what a listener knows of the connection to its publisher. An engine that begins anew need
// not show that by its numbers: it may have counted further than its predecessor before it is heard.
// But its connections end with it. So what the engine has published under the number of the last batch
// that came before a new connection is compared with that batch (kv-index.md 4.2), and if they differ,
// all that is known is void.
type kvLink struct {
	heard   bool             // a batch has come over the last one
	doubted sequence         // the last batch applied before a connection of which it is not known who is there
	digest  uint64           // of the payload of that batch, of which its time is a part
	checks  int              // of this connection, that have brought no answer
	late    bool             // the check after a silence is the next, or over
	again   <-chan time.Time // when to check again; nil for never
	blamed  time.Time        // when the worker was last said to have begun anew, if nothing has come of that yet
}

// kvNews is what a queue tells a listener beside batches, in its place among them.
type kvNews uint8

const (
	kvLinked    kvNews = iota + 1 // there is another connection than before: what follows came over it
	kvRestarted                   // the worker's process has begun anew
)

// Restarted tells that a worker's process has begun anew. What its publishers have told is dropped, or
// verified where an engine can be asked, but only with a connection that is new, too: one that goes on
// shows that the publisher does.
func (k *KVListeners) Restarted(id worker.ID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if w := k.workers[id]; w != nil {
		for _, l := range w.listeners {
			l.queue.put(kvBatch{news: kvRestarted})
		}
	}
}

// learn takes in what is told beside batches.
func (l *kvListener) learn(ctx context.Context, news kvNews) {
	k := &l.link
	if news == kvRestarted {
		k.blamed = time.Now()
		if k.doubted.known {
			l.check(ctx)
		}
		return
	}
	k.heard, k.late, k.checks = false, false, 0
	if !k.doubted.known {
		k.doubted, k.digest = l.cursor.applied, l.digest
	}
	l.check(ctx)
}

// check finds out who is at the other end of a new connection, and catches up with it: a batch that
// was sent before the subscription had arrived is missed, and nothing tells of it but the next one. So
// it catches up once more after a silence.
func (l *kvListener) check(ctx context.Context) {
	k := &l.link
	k.again = nil
	doubted := k.doubted.known
	if _, wanted := l.attempt(); !wanted || k.heard && !doubted {
		return // while it is paused nothing is applied; there will be another connection
	}
	publisher := l.ask(ctx)
	if l.over(ctx) {
		return
	}
	if doubted {
		l.k.metrics.links[publisher].Inc()
	}
	switch {
	case publisher != kvUnknown:
		k.doubted = sequence{}
		if !k.late {
			k.late, k.again = true, time.After(l.k.cfg.LinkSilence)
		}
		return
	case k.doubted.known && time.Since(k.blamed) < restartHolds:
		l.anew()
	}
	if k.checks++; l.source.Replay != "" && k.checks < maxKVChecks {
		k.again = time.After(firstKVCheck << (k.checks - 1))
	}
}

// anew drops all that is known, since it is of a process that is no more.
func (l *kvListener) anew() {
	l.forget()
	l.cursor = cursor{}
}

// ask asks the engine for all after the last batch applied, and which publisher it is. If that is
// another one, all that is known is dropped, and what the new one has told is asked for instead.
func (l *kvListener) ask(ctx context.Context) (publisher string) {
	if l.source.Replay == "" {
		return kvUnknown
	}
	if k := &l.link; k.doubted.known {
		publisher := kvUnknown
		outcome, err := l.replay(ctx, k.doubted.number, func(seq uint64, payload []byte) string {
			if seq > k.doubted.number && publisher == kvSame {
				return l.catchUp(seq, payload, l.source.Rank.DP)
			}
			switch {
			case seq < k.doubted.number: // nobody has asked for it
			case seq == k.doubted.number && xxh3.Hash(payload) == k.digest:
				publisher = kvSame
			default:
				publisher = kvAnew
				return replayComplete
			}
			return ""
		})
		l.tellReplay(outcome, err)
		if publisher == kvSame {
			return kvSame
		}
		if outcome != replayComplete {
			return kvUnknown
		}
		// It has another batch of that number, or none at all, though it keeps the last ones.
	}
	return l.askAll(ctx)
}

// askAll asks for all that a publisher has told since its process began, or since the last batch
// applied if that is not in doubt.
func (l *kvListener) askAll(ctx context.Context) (publisher string) {
	doubted, answered := l.link.doubted.known, false
	publisher, from := kvSame, l.cursor.expected()
	if doubted {
		publisher, from = kvAnew, 0
	}
	first := func() {
		if !answered && doubted {
			l.anew()
		}
		answered = true
	}
	outcome, err := l.replay(ctx, from, func(seq uint64, payload []byte) string {
		if !answered && l.foreign(payload) {
			return replayRank // and nothing is known
		}
		first()
		return l.catchUp(seq, payload, l.source.Rank.DP)
	})
	switch l.tellReplay(outcome, err); {
	case outcome == replayComplete:
		first()
	case !answered:
		return kvUnknown
	}
	return publisher
}

// foreign tells whether a payload is of a rank that the publisher has never spoken for.
func (l *kvListener) foreign(payload []byte) bool {
	return l.batch.Decode(payload) == nil && l.batch.HasRank && l.batch.Rank != l.source.Rank.DP && !l.fed[l.batch.Rank]
}
