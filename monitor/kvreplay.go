package monitor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// What became of a replay.
const (
	replayComplete  = "complete"      // the engine sent all that it still has
	replayTimeout   = "timeout"       // it fell silent before the end, or went on for too long
	replayRank      = "rank_mismatch" // its batches are another rank's
	replayMalformed = "malformed"     // what came is no answer
	replayFailed    = "failed"        // no socket could be had
)

const (
	kvHeartbeat   = 5 * time.Second
	maxKVFrame    = 64 << 20       // bytes; a peer that sends a larger frame is cut off by libzmq
	replayFrames  = 4              // of the longest answer: nothing, topic, sequence, payload
	maxKVReplays  = 32             // at a time, since each holds a thread
	replayLooks   = pollTimeout    // how often the end of Run is looked for
	endOfReplay   = math.MaxUint64 // in place of a sequence number
	sequenceBytes = 8
)

// replay asks the engine for the batches that it still has, from the given one on, and hands them
// to use until that returns another outcome than "". If the listener or ctx ends, the outcome is "".
// The time for it includes that until other replays leave it a place. Every replay has sockets of
// its own: what a silent engine says later must not be taken for the answer to the next request.
func (l *kvListener) replay(ctx context.Context, from uint64, use func(seq uint64, payload []byte) string) (outcome string, err error) {
	began := time.Now()
	late := time.NewTimer(l.k.cfg.ReplayTotal)
	defer late.Stop()
	select {
	case l.k.replays <- struct{}{}:
		defer func() { <-l.k.replays }()
	case <-late.C:
		return replayTimeout, nil
	case <-l.done:
		return "", nil
	case <-ctx.Done():
		return "", nil
	}
	zctx, err := zmq.NewContext()
	if err != nil {
		return replayFailed, fmt.Errorf("monitor: starting libzmq: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	soc, err := zctx.NewSocket(zmq.DEALER)
	if err != nil {
		return replayFailed, fmt.Errorf("monitor: making a socket: %w", err)
	}
	defer func() { err = errors.Join(err, soc.Close()) }()
	err = errors.Join(configure(soc, kvHeartbeat), soc.SetMaxmsgsize(maxKVFrame), soc.SetSndtimeo(0), soc.Connect(l.source.Replay))
	if err == nil {
		_, err = soc.SendMessage([]byte{}, binary.BigEndian.AppendUint64(nil, from))
	}
	if err != nil {
		return replayFailed, fmt.Errorf("monitor: replay from %s: %w", l.source.Replay, err)
	}
	return l.answers(ctx, soc, began, use)
}

// answers takes in what comes in answer to a request.
func (l *kvListener) answers(ctx context.Context, soc *zmq.Socket, began time.Time, use func(seq uint64, payload []byte) string) (outcome string, err error) {
	poller := zmq.NewPoller()
	poller.Add(soc, zmq.POLLIN)
	cfg := &l.k.cfg
	for heard := time.Now(); ; {
		frames, err := message(soc, replayFrames)
		if errors.Is(err, errNone) {
			switch now := time.Now(); {
			case l.over(ctx):
				return "", nil
			case now.Sub(heard) > cfg.ReplayIdle || now.Sub(began) > cfg.ReplayTotal:
				return replayTimeout, nil
			}
			if _, err := poller.Poll(min(replayLooks, cfg.ReplayIdle)); err != nil && !isTransient(err) {
				return replayFailed, err
			}
			continue
		}
		if err != nil {
			return replayFailed, err
		}
		seq, payload, ok := parseReply(frames)
		switch {
		case !ok:
			return replayMalformed, nil
		case seq == endOfReplay || len(payload) == 0:
			return replayComplete, nil
		}
		heard = time.Now()
		if outcome := use(seq, payload); outcome != "" {
			return outcome, nil
		}
		if heard.Sub(began) > cfg.ReplayTotal {
			return replayTimeout, nil
		}
		if l.over(ctx) {
			return "", nil
		}
	}
}

// parseReply reads the frames of an answer from their end, since engines differ in what precedes
// the sequence number.
func parseReply(frames [][]byte) (seq uint64, payload []byte, ok bool) {
	n := len(frames)
	if n < 2 || n > replayFrames {
		return 0, nil, false
	}
	number := frames[n-2]
	payload = frames[n-1]
	if len(number) != sequenceBytes {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(number), payload, true
}

// kvFrames are those of a live message: topic, sequence, payload.
const kvFrames = 3

// parseLive reads the frames of a live message.
func parseLive(frames [][]byte) (b kvBatch, ok bool) {
	if len(frames) != kvFrames || len(frames[1]) != sequenceBytes {
		return b, false
	}
	b = kvBatch{seq: binary.BigEndian.Uint64(frames[1]), payload: frames[2]}
	return b, b.seq != endOfReplay
}
