package wire

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/tinylib/msgp/msgp"

	"spillway/worker"
)

// ReplicaTopic is the topic of reservation events between replicas.
const ReplicaTopic = "dynamo.slot-tracker.v1"

// ReplicaFrames is the number of frames of a reservation event's message: topic and envelope.
const ReplicaFrames = 2

// MaxReplicaBytes bounds the frames of one reservation event together. The slot tracker takes
// request bodies of up to 2 MiB, and three characters of one ("-1,") can become nine bytes.
const MaxReplicaBytes = 8 << 20

// ErrTenant means that an envelope names the tenant by two keys, and differently.
var ErrTenant = errors.New("wire: tenant_id and routing_group differ")

// ReplicaKind is what happened to a reservation.
type ReplicaKind uint8

// What can happen to a reservation. The zero ReplicaKind is none of them.
const (
	ReplicaAdd         ReplicaKind = iota + 1 // it was made
	ReplicaPrefillDone                        // its prompt has been computed
	ReplicaFree                               // it was given back
)

// ReplicaKinds are all kinds.
var ReplicaKinds = []ReplicaKind{ReplicaAdd, ReplicaPrefillDone, ReplicaFree}

// String is the kind as metrics name it.
func (k ReplicaKind) String() string {
	switch k {
	case ReplicaAdd:
		return "add"
	case ReplicaPrefillDone:
		return "prefill_done"
	case ReplicaFree:
		return "free"
	}
	return "unknown"
}

// ReplicaFormat is how an envelope names the tenant. The two revisions of the protocol use
// different keys, and each skips the key of the other.
type ReplicaFormat uint8

// The formats. FormatBoth is understood by both revisions.
const (
	FormatBoth   ReplicaFormat = iota // tenant_id and routing_group
	FormatTenant                      // tenant_id
	FormatGroup                       // routing_group
)

// ReplicaEvent tells other replicas what happened to one reservation.
type ReplicaEvent struct {
	Model, Tenant string // the partition
	BlockSize     uint32 // tokens per block; receivers with another size drop the event
	Reservation   string // its ID
	Rank          worker.Rank
	Kind          ReplicaKind
	Origin        uint64  // random identity of the process that sent the event
	LoRA          string  // the adapter, or "" for none
	Promise       Promise // of ReplicaAdd; else zero
}

// Promise is what an added reservation holds.
type Promise struct {
	Hashes               []uint64       // sequence hashes of the prompt's blocks; nil was not said
	TrackPrefill         bool           // PrefillTokens count until ReplicaPrefillDone
	PrefillTokens        uint64         // prompt tokens to compute
	PrefillDuration      *time.Duration // how long that is expected to take, or nil if not said
	ExpectedOutputTokens *uint32        // or nil if not said
}

// hinted tells whether p says anything about prefill, beyond that it is tracked.
func (p *Promise) hinted() bool { return p.PrefillTokens > 0 || p.PrefillDuration != nil }

// What the structs of an event look like. An event that lacks both of tenant_id and
// routing_group is refused apart from this.
var (
	replicaShape = shape{names: []string{"model_name", "tenant_id", "block_size", "event", "routing_group"},
		required: 1<<0 | 1<<2 | 1<<3, positional: 4}
	eventShape    = shape{names: []string{"request_id", "worker", "data", "router_id", "lora_name"}, required: 0b1111, positional: 5}
	rankShape     = shape{names: []string{"worker_id", "dp_rank"}, required: 0b11, positional: 2}
	promiseShape  = shape{names: []string{"token_sequence", "track_prefill_tokens", "expected_output_tokens", "prefill_load_hint"}, positional: 4}
	hintShape     = shape{names: []string{"initial_effective_prefill_tokens", "expected_prefill_duration"}, required: 0b1, positional: 2}
	durationShape = shape{names: []string{"secs", "nanos"}, required: 0b11, positional: 2}
)

const (
	variantAdd         = "AddRequest"
	variantPrefillDone = "MarkPrefillCompleted"
	variantFree        = "Free"
)

// AppendReplica appends to dst the second frame of e's message. The first is ReplicaTopic.
func AppendReplica(dst []byte, e *ReplicaEvent, format ReplicaFormat) []byte {
	keys := uint32(4)
	if format == FormatBoth {
		keys++
	}
	b := msgp.AppendMapHeader(dst, keys)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), e.Model)
	if format != FormatGroup {
		b = msgp.AppendString(msgp.AppendString(b, "tenant_id"), e.Tenant)
	}
	if format != FormatTenant {
		b = msgp.AppendString(msgp.AppendString(b, "routing_group"), e.Tenant)
	}
	b = msgp.AppendUint32(msgp.AppendString(b, "block_size"), e.BlockSize)
	b = msgp.AppendMapHeader(msgp.AppendString(b, "event"), 5)
	b = msgp.AppendString(msgp.AppendString(b, "request_id"), e.Reservation)
	b = msgp.AppendMapHeader(msgp.AppendString(b, "worker"), 2)
	b = msgp.AppendUint64(msgp.AppendString(b, "worker_id"), uint64(e.Rank.Worker))
	b = msgp.AppendUint32(msgp.AppendString(b, "dp_rank"), e.Rank.DP)
	b = msgp.AppendString(b, "data")
	switch e.Kind {
	case ReplicaAdd:
		b = msgp.AppendString(msgp.AppendMapHeader(b, 1), variantAdd)
		b = appendPromise(b, &e.Promise)
	case ReplicaPrefillDone:
		b = msgp.AppendString(b, variantPrefillDone)
	case ReplicaFree:
		b = msgp.AppendString(b, variantFree)
	default:
		panic(fmt.Sprintf("wire: a reservation event of kind %d", e.Kind))
	}
	b = msgp.AppendUint64(msgp.AppendString(b, "router_id"), e.Origin)
	b = msgp.AppendString(b, "lora_name")
	if e.LoRA == "" {
		return msgp.AppendNil(b)
	}
	return msgp.AppendString(b, e.LoRA)
}

func appendPromise(b []byte, p *Promise) []byte {
	b = msgp.AppendMapHeader(b, 4)
	b = msgp.AppendString(b, "token_sequence")
	if p.Hashes == nil {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendArrayHeader(b, uint32(len(p.Hashes)))
		for _, h := range p.Hashes {
			b = msgp.AppendUint64(b, h)
		}
	}
	b = msgp.AppendBool(msgp.AppendString(b, "track_prefill_tokens"), p.TrackPrefill)
	b = msgp.AppendString(b, "expected_output_tokens")
	if p.ExpectedOutputTokens == nil {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint32(b, *p.ExpectedOutputTokens)
	}
	b = msgp.AppendString(b, "prefill_load_hint")
	if !p.hinted() {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendMapHeader(b, 2)
	b = msgp.AppendUint64(msgp.AppendString(b, "initial_effective_prefill_tokens"), p.PrefillTokens)
	b = msgp.AppendString(b, "expected_prefill_duration")
	if p.PrefillDuration == nil {
		return msgp.AppendNil(b)
	}
	d := max(*p.PrefillDuration, 0)
	b = msgp.AppendMapHeader(b, 2)
	b = msgp.AppendUint64(msgp.AppendString(b, "secs"), uint64(d/time.Second))
	return msgp.AppendUint32(msgp.AppendString(b, "nanos"), uint32(d%time.Second))
}

// ParseReplica reads a reservation event from the frames of a message. It accepts what the
// original does: both names of the tenant, keys in any order and unknown ones, numbers of any
// width, structs as arrays, and bytes after the envelope. Its errors wrap ErrFrames, ErrTopic,
// ErrTenant or ErrPayload. The event keeps nothing of frames.
func ParseReplica(frames [][]byte) (ReplicaEvent, error) {
	size := 0
	for _, f := range frames {
		size += len(f)
	}
	switch {
	case len(frames) != ReplicaFrames:
		return ReplicaEvent{}, fmt.Errorf("%w: %d frames instead of %d", ErrFrames, len(frames), ReplicaFrames)
	case size > MaxReplicaBytes:
		return ReplicaEvent{}, fmt.Errorf("%w: %d bytes are more than %d", ErrFrames, size, MaxReplicaBytes)
	case string(frames[0]) != ReplicaTopic: // subscriptions match prefixes
		return ReplicaEvent{}, fmt.Errorf("%w: %.40q", ErrTopic, frames[0])
	}
	var e ReplicaEvent
	if err := e.readEnvelope(frames[1]); err != nil {
		if !errors.Is(err, ErrTenant) {
			err = fmt.Errorf("%w: %w", ErrPayload, err)
		}
		return ReplicaEvent{}, err
	}
	return e, nil
}

func (e *ReplicaEvent) readEnvelope(b []byte) error {
	var tenant, group *string
	_, err := replicaShape.read(b, func(key int, b []byte) (rest []byte, err error) {
		switch key {
		case 0:
			e.Model, rest, err = readString(b)
		case 1:
			tenant = new(string)
			*tenant, rest, err = readString(b)
		case 2:
			e.BlockSize, rest, err = msgp.ReadUint32Bytes(b)
		case 3:
			rest, err = e.readEvent(b)
		case 4:
			group = new(string)
			*group, rest, err = readString(b)
		}
		return rest, err
	})
	switch {
	case err != nil:
		return err
	case tenant == nil && group == nil:
		return errors.New("tenant_id is missing")
	case tenant != nil && group != nil && *tenant != *group:
		return ErrTenant
	case tenant != nil:
		e.Tenant = *tenant
	default:
		e.Tenant = *group
	}
	return nil
}

func (e *ReplicaEvent) readEvent(b []byte) ([]byte, error) {
	return eventShape.read(b, func(key int, b []byte) (rest []byte, err error) {
		switch key {
		case 0:
			e.Reservation, rest, err = readString(b)
		case 1:
			rest, err = readRank(b, &e.Rank)
		case 2:
			rest, err = e.readData(b)
		case 3:
			e.Origin, rest, err = msgp.ReadUint64Bytes(b)
		case 4:
			if msgp.IsNil(b) {
				return b[1:], nil
			}
			e.LoRA, rest, err = readString(b)
		}
		return rest, err
	})
}

func readRank(b []byte, r *worker.Rank) ([]byte, error) {
	return rankShape.read(b, func(key int, b []byte) (rest []byte, err error) {
		if key == 1 {
			r.DP, rest, err = msgp.ReadUint32Bytes(b)
			return rest, err
		}
		var id uint64
		id, rest, err = msgp.ReadUint64Bytes(b)
		r.Worker = worker.ID(id)
		return rest, err
	})
}

// readData reads what happened: a name, or a map of one name and what belongs to it.
func (e *ReplicaEvent) readData(b []byte) ([]byte, error) {
	alone := msgp.NextType(b) == msgp.StrType
	if !alone {
		n, rest, err := msgp.ReadMapHeaderBytes(b)
		if err != nil {
			return nil, err
		}
		if n != 1 {
			return nil, fmt.Errorf("%d variants", n)
		}
		b = rest
	}
	name, b, err := msgp.ReadStringZC(b)
	if err != nil {
		return nil, err
	}
	switch string(name) {
	case variantAdd:
		if alone {
			return nil, errors.New(variantAdd + " without its body")
		}
		e.Kind = ReplicaAdd
		return e.Promise.read(b)
	case variantPrefillDone:
		e.Kind = ReplicaPrefillDone
	case variantFree:
		e.Kind = ReplicaFree
	default:
		return nil, fmt.Errorf("unknown variant %.40q", name)
	}
	if alone {
		return b, nil
	}
	return msgp.ReadNilBytes(b)
}

func (p *Promise) read(b []byte) ([]byte, error) {
	p.TrackPrefill = true
	return promiseShape.read(b, func(key int, b []byte) (rest []byte, err error) {
		switch key {
		case 0:
			p.Hashes, rest, err = readHashes(b)
		case 1:
			p.TrackPrefill, rest, err = msgp.ReadBoolBytes(b)
		case 2:
			if msgp.IsNil(b) {
				return b[1:], nil
			}
			p.ExpectedOutputTokens = new(uint32)
			*p.ExpectedOutputTokens, rest, err = msgp.ReadUint32Bytes(b)
		case 3:
			rest, err = p.readHint(b)
		}
		return rest, err
	})
}

// readHashes takes no more memory than eight times what b has.
func readHashes(b []byte) ([]uint64, []byte, error) {
	if msgp.IsNil(b) {
		return nil, b[1:], nil
	}
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, nil, err
	}
	if uint64(n) > uint64(len(b)) {
		return nil, nil, msgp.ErrShortBytes
	}
	hashes := make([]uint64, n)
	for i := range hashes {
		if hashes[i], b, err = msgp.ReadUint64Bytes(b); err != nil {
			return nil, nil, err
		}
	}
	return hashes, b, nil
}

func (p *Promise) readHint(b []byte) ([]byte, error) {
	if msgp.IsNil(b) {
		return b[1:], nil
	}
	return hintShape.read(b, func(key int, b []byte) (rest []byte, err error) {
		if key == 0 {
			p.PrefillTokens, rest, err = msgp.ReadUint64Bytes(b)
			return rest, err
		}
		if msgp.IsNil(b) {
			return b[1:], nil
		}
		p.PrefillDuration = new(time.Duration)
		*p.PrefillDuration, rest, err = readDuration(b)
		return rest, err
	})
}

// readDuration reads a duration; one that time.Duration cannot hold becomes the longest it can.
func readDuration(b []byte) (time.Duration, []byte, error) {
	var secs uint64
	var nanos uint32
	rest, err := durationShape.read(b, func(key int, b []byte) (rest []byte, err error) {
		if key == 0 {
			secs, rest, err = msgp.ReadUint64Bytes(b)
		} else {
			nanos, rest, err = msgp.ReadUint32Bytes(b)
		}
		return rest, err
	})
	const most = math.MaxInt64/uint64(time.Second) - 5 // nanos may hold more than four seconds
	if secs > most {
		return math.MaxInt64, rest, err
	}
	return time.Duration(secs)*time.Second + time.Duration(nanos), rest, err
}
