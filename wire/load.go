// Package wire turns the bytes of events into Go values. It checks everything that an event
// says twice, and refuses what it does not know. It does no I/O.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"

	"spillway/worker"
)

// LoadTopic is the topic of load events.
const LoadTopic = "kv_metrics"

// LoadFrames is the number of frames of a load event's message: topic, publisher, sequence, and
// the binary frame.
const LoadFrames = 4

// MaxLoadBytes bounds the frames of one load event together. Real ones have some 200 bytes.
const MaxLoadBytes = 16 << 10

// Why a message is no load event. The errors of ParseLoad wrap one of them each.
var (
	ErrFrames   = errors.New("wire: not the frames of an event")                // their number or sizes
	ErrTopic    = errors.New("wire: another topic")                             // on the outside or in the envelope
	ErrVersion  = errors.New("wire: unknown version")                           // of the binary frame
	ErrEnvelope = errors.New("wire: malformed envelope")                        // or its length is not the one announced
	ErrIdentity = errors.New("wire: frames and envelope name different events") // publisher or sequence
	ErrPayload  = errors.New("wire: malformed payload")
)

// LoadEvent is one report on the load of a rank: by the worker itself (KVUsedBlocks), or by a
// router on what it has sent there (DecodeBlocks and PrefillTokens). Nil was not said.
type LoadEvent struct {
	Publisher uint64 // random per process that reports
	Sequence  uint64 // counts the events of the publisher from 0

	Rank          worker.Rank
	DecodeBlocks  *uint64 // KV blocks that the publisher's requests hold on the rank
	PrefillTokens *uint64 // prompt tokens of the publisher's requests that wait for prefill there
	KVUsedBlocks  *uint64 // KV blocks in use, whoever uses them
}

// ParseLoad reads a load event from the frames of a message that came directly from its
// publisher. Keys may come in any order, unknown ones are skipped, numbers may have any width.
// The event keeps nothing of frames.
func ParseLoad(frames [][]byte) (LoadEvent, error) {
	size := 0
	for _, f := range frames {
		size += len(f)
	}
	switch {
	case len(frames) != LoadFrames:
		return LoadEvent{}, fmt.Errorf("%w: %d frames instead of %d", ErrFrames, len(frames), LoadFrames)
	case size > MaxLoadBytes:
		return LoadEvent{}, fmt.Errorf("%w: %d bytes are more than %d", ErrFrames, size, MaxLoadBytes)
	case string(frames[0]) != LoadTopic: // subscriptions match prefixes
		return LoadEvent{}, fmt.Errorf("%w: %.40q", ErrTopic, frames[0])
	case len(frames[1]) != 8 || len(frames[2]) != 8:
		return LoadEvent{}, fmt.Errorf("%w: publisher and sequence have %d and %d bytes instead of 8",
			ErrFrames, len(frames[1]), len(frames[2]))
	}
	body, err := unframe(frames[3])
	if err != nil {
		return LoadEvent{}, err
	}
	e, err := readEnvelope(body)
	if err != nil {
		return LoadEvent{}, fmt.Errorf("%w: %w", ErrEnvelope, err)
	}
	switch {
	case string(e.topic) != LoadTopic:
		return LoadEvent{}, fmt.Errorf("%w: %.40q in the envelope", ErrTopic, e.topic)
	case binary.BigEndian.Uint64(frames[1]) != e.publisher:
		return LoadEvent{}, fmt.Errorf("%w: publisher %x in frame, %d in envelope", ErrIdentity, frames[1], e.publisher)
	case binary.BigEndian.Uint64(frames[2]) != e.sequence:
		return LoadEvent{}, fmt.Errorf("%w: sequence %x in frame, %d in envelope", ErrIdentity, frames[2], e.sequence)
	}
	event := LoadEvent{Publisher: e.publisher, Sequence: e.sequence}
	if err := event.readPayload(e.payload); err != nil {
		return LoadEvent{}, fmt.Errorf("%w: %w", ErrPayload, err)
	}
	return event, nil
}

// unframe takes the binary frame apart: a version, the length of the envelope, the envelope.
func unframe(frame []byte) ([]byte, error) {
	const version, header = 1, 5
	switch {
	case len(frame) < header:
		return nil, fmt.Errorf("%w: a binary frame of %d bytes", ErrFrames, len(frame))
	case frame[0] != version:
		return nil, fmt.Errorf("%w: %d", ErrVersion, frame[0])
	}
	said, body := binary.BigEndian.Uint32(frame[1:header]), frame[header:]
	if uint64(said) != uint64(len(body)) {
		return nil, fmt.Errorf("%w: %d bytes, %d announced", ErrEnvelope, len(body), said)
	}
	return body, nil
}

// envelope is what every event of the event plane is wrapped in. It aliases the frame.
type envelope struct {
	publisher, sequence uint64
	topic, payload      []byte
}

func readEnvelope(b []byte) (envelope, error) {
	var e envelope
	err := readMap(b, []string{"publisher_id", "sequence", "published_at", "topic", "payload"}, 5,
		func(key int, b []byte) (rest []byte, err error) {
			switch key {
			case 0:
				e.publisher, rest, err = msgp.ReadUint64Bytes(b)
			case 1:
				e.sequence, rest, err = msgp.ReadUint64Bytes(b)
			case 2: // by the publisher's clock, which is not ours
				_, rest, err = msgp.ReadUint64Bytes(b)
			case 3:
				e.topic, rest, err = msgp.ReadStringZC(b)
			case 4:
				e.payload, rest, err = msgp.ReadBytesZC(b)
			}
			return rest, err
		})
	return e, err
}

func (e *LoadEvent) readPayload(b []byte) error {
	return readMap(b, []string{"worker_id", "dp_rank", "active_decode_blocks", "active_prefill_tokens", "kv_used_blocks"}, 1,
		func(key int, b []byte) (rest []byte, err error) {
			switch key {
			case 0:
				var id uint64
				id, rest, err = msgp.ReadUint64Bytes(b)
				e.Rank.Worker = worker.ID(id)
			case 1:
				var dp uint64
				if dp, rest, err = msgp.ReadUint64Bytes(b); err == nil && dp >= worker.AnyDP {
					err = fmt.Errorf("%d is no rank", dp)
				}
				e.Rank.DP = uint32(dp & math.MaxUint32)
			case 2:
				e.DecodeBlocks, rest, err = readOptional(b)
			case 3:
				e.PrefillTokens, rest, err = readOptional(b)
			case 4:
				e.KVUsedBlocks, rest, err = readOptional(b)
			}
			return rest, err
		})
}
