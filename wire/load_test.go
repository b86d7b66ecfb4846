package wire_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"spillway/wire"
	"spillway/worker"
)

// The published test vectors: two payloads, and the envelope around the first.
const (
	routerPayload = "85a9776f726b65725f696407a764705f72616e6b00b46163746976655f6465636f64655f626c6f636b735ab5616374697665" +
		"5f70726566696c6c5f746f6b656e73cd2ee0ae6b765f757365645f626c6f636b73c0"
	workerPayload = "85a9776f726b65725f696407a764705f72616e6b01b46163746976655f6465636f64655f626c6f636b73c0b5616374697665" +
		"5f70726566696c6c5f746f6b656e73c0ae6b765f757365645f626c6f636b73cd0366"
	envelopeHead = "85ac7075626c69736865725f6964cd1234a873657175656e636503ac7075626c69736865645f6174cf0000018bcfe56800" +
		"a5746f706963aa6b765f6d657472696373a77061796c6f6164c454"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// vector is the first vector as it comes out of a socket.
func vector(t testing.TB) [][]byte {
	return [][]byte{[]byte("kv_metrics"), unhex(t, "0000000000001234"), unhex(t, "0000000000000003"),
		unhex(t, "01000000a0"+envelopeHead+routerPayload)}
}

// wrap puts a payload into the frames of an event of publisher 0x1234, sequence 3.
func wrap(payload []byte) [][]byte {
	b := msgp.AppendMapHeader(nil, 5)
	b = msgp.AppendUint64(msgp.AppendString(b, "publisher_id"), 0x1234)
	b = msgp.AppendUint64(msgp.AppendString(b, "sequence"), 3)
	b = msgp.AppendUint64(msgp.AppendString(b, "published_at"), 1)
	b = msgp.AppendString(msgp.AppendString(b, "topic"), "kv_metrics")
	b = msgp.AppendBytes(msgp.AppendString(b, "payload"), payload)
	return framed(b)
}

func framed(envelope []byte) [][]byte {
	frame := binary.BigEndian.AppendUint32([]byte{1}, uint32(len(envelope)))
	return [][]byte{[]byte("kv_metrics"), {0, 0, 0, 0, 0, 0, 0x12, 0x34}, {0, 0, 0, 0, 0, 0, 0, 3}, append(frame, envelope...)}
}

func show(e wire.LoadEvent) string {
	num := func(n *uint64) string {
		if n == nil {
			return "-"
		}
		return fmt.Sprint(*n)
	}
	return fmt.Sprintf("publisher=%#x sequence=%d worker=%v dp=%d A=%s P=%s U=%s", e.Publisher, e.Sequence,
		e.Rank.Worker, e.Rank.DP, num(e.DecodeBlocks), num(e.PrefillTokens), num(e.KVUsedBlocks))
}

// TestLoadVectors is row 23, byte for byte.
func TestLoadVectors(t *testing.T) {
	frames := vector(t)
	if got := len(frames[3]); got != 165 {
		t.Fatalf("the binary frame has %d bytes, want 5 and 160", got)
	}
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   string
	}{
		{"23 router", frames, "publisher=0x1234 sequence=3 worker=7 dp=0 A=90 P=12000 U=-"},
		{"23 worker", wrap(unhex(t, workerPayload)), "publisher=0x1234 sequence=3 worker=7 dp=1 A=- P=- U=870"},
	} {
		if got, err := wire.ParseLoad(tt.frames); err != nil || show(got) != tt.want {
			t.Errorf("%s: ParseLoad = %s, %v, want %s", tt.name, show(got), err, tt.want)
		}
	}
}

// TestLoadFlips changes each byte of the vector's identity, and checks that no change of any
// byte goes unnoticed or is taken for another publisher, sequence or topic.
func TestLoadFlips(t *testing.T) {
	envelope := unhex(t, envelopeHead)
	identity := map[int]bool{} // bytes of the binary frame that say who and what
	mark := func(part string) {
		at := 5 + bytes.Index(envelope, []byte(part))
		for i := range len(part) {
			identity[at+i] = true
		}
	}
	mark("publisher_id\xcd\x12\x34")
	mark("sequence\x03")
	mark("topic\xaakv_metrics")
	for frame, whole := range vector(t) {
		for at := range whole {
			for bit := range 8 {
				frames := vector(t)
				frames[frame][at] ^= 1 << bit
				got, err := wire.ParseLoad(frames)
				if err == nil && (frame < 3 || at < 5 || identity[at] || got.Publisher != 0x1234 || got.Sequence != 3) {
					t.Errorf("frame %d, byte %d, bit %d flipped: accepted as %s", frame, at, bit, show(got))
				}
			}
		}
	}
}

// payload is a map of the given pairs; a nil value is encoded as nil.
func payload(pairs ...any) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(pairs)/2))
	for i := 0; i < len(pairs); i += 2 {
		if raw, ok := pairs[i].(msgp.Raw); ok {
			b = append(b, raw...)
		} else {
			b = msgp.AppendString(b, pairs[i].(string))
		}
		if raw, ok := pairs[i+1].(msgp.Raw); ok {
			b = append(b, raw...)
			continue
		}
		b, _ = msgp.AppendIntf(b, pairs[i+1])
	}
	return b
}

func TestLoadAccepts(t *testing.T) {
	for _, tt := range []struct {
		name    string
		payload []byte
		want    string
	}{
		{"worker alone", payload("worker_id", 7), "worker=7 dp=0 A=- P=- U=-"},
		{"another order", payload("kv_used_blocks", 1, "dp_rank", 2, "worker_id", 3), "worker=3 dp=2 A=- P=- U=1"},
		{"unknown keys", payload("x", map[string]any{"a": []any{1, "b", nil, 2.5, []byte{1}}}, "worker_id", 3, "y", nil, "", true),
			"worker=3 dp=0 A=- P=- U=-"},
		{"wide numbers", payload("worker_id", msgp.Raw("\xcf\xff\xff\xff\xff\xff\xff\xff\xff"), "dp_rank", msgp.Raw("\xcf\x00\x00\x00\x00\xff\xff\xff\xfe"),
			"active_decode_blocks", msgp.Raw("\xd3\x00\x00\x00\x00\x00\x00\x00\x05"), "active_prefill_tokens", msgp.Raw("\xce\x00\x00\x00\x06"),
			"kv_used_blocks", msgp.Raw("\xcd\x00\x00")), "worker=18446744073709551615 dp=4294967294 A=5 P=6 U=0"},
		{"a map in the widest form", append([]byte("\xdf\x00\x00\x00\x01"), payload("worker_id", 1)[1:]...), "worker=1 dp=0 A=- P=- U=-"},
	} {
		got, err := wire.ParseLoad(wrap(tt.payload))
		if want := "publisher=0x1234 sequence=3 " + tt.want; err != nil || show(got) != want {
			t.Errorf("%s: ParseLoad = %s, %v, want %s", tt.name, show(got), err, want)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	good := payload("worker_id", 7)
	deep := append(bytes.Repeat([]byte{0x91}, 8000), 0xc0) // arrays in arrays
	change := func(f func(frames [][]byte) [][]byte) [][]byte { return f(vector(t)) }
	noPayload := msgp.AppendMapHeader(nil, 1)
	noPayload = msgp.AppendUint64(msgp.AppendString(noPayload, "publisher_id"), 0x1234)
	textPayload := bytes.Replace(unhex(t, envelopeHead+routerPayload), []byte("payload\xc4\x54"), []byte("payload\xd9\x54"), 1)
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   error
	}{
		{"nothing", nil, wire.ErrFrames},
		{"three frames", change(func(f [][]byte) [][]byte { return f[:3] }), wire.ErrFrames},
		{"five frames", change(func(f [][]byte) [][]byte { return append(f, nil) }), wire.ErrFrames},
		{"empty frames", [][]byte{{}, {}, {}, {}}, wire.ErrTopic},
		{"a longer topic", change(func(f [][]byte) [][]byte { f[0] = []byte("kv_metrics2"); return f }), wire.ErrTopic},
		{"a broker's subject", change(func(f [][]byte) [][]byte {
			f[0] = []byte("namespace.n.component.c.endpoint.e.kv_metrics")
			return f
		}), wire.ErrTopic},
		{"seven bytes of publisher", change(func(f [][]byte) [][]byte { f[1] = f[1][1:]; return f }), wire.ErrFrames},
		{"nine bytes of sequence", change(func(f [][]byte) [][]byte { f[2] = append(f[2], 0); return f }), wire.ErrFrames},
		{"no binary frame", change(func(f [][]byte) [][]byte { f[3] = nil; return f }), wire.ErrFrames},
		{"version 2", change(func(f [][]byte) [][]byte { f[3][0] = 2; return f }), wire.ErrVersion},
		{"too long", change(func(f [][]byte) [][]byte { f[3] = make([]byte, wire.MaxLoadBytes); return f }), wire.ErrFrames},
		{"a length that is not", change(func(f [][]byte) [][]byte { f[3][4]++; return f }), wire.ErrEnvelope},
		{"cut", change(func(f [][]byte) [][]byte { f[3] = f[3][:100]; return f }), wire.ErrEnvelope},
		{"empty envelope", framed(nil), wire.ErrEnvelope},
		{"an array for an envelope", framed([]byte{0x90}), wire.ErrEnvelope},
		{"an envelope without a payload", framed(noPayload), wire.ErrEnvelope},
		{"text for a payload", framed(textPayload), wire.ErrEnvelope},
		{"bytes after the envelope", framed(append(unhex(t, envelopeHead+routerPayload), 0)), wire.ErrEnvelope},
		{"another publisher", change(func(f [][]byte) [][]byte { f[1][7]++; return f }), wire.ErrIdentity},
		{"another sequence", change(func(f [][]byte) [][]byte { f[2][7]++; return f }), wire.ErrIdentity},
		{"empty payload", wrap(nil), wire.ErrPayload},
		{"JSON", wrap([]byte(`{"worker_id":7}`)), wire.ErrPayload},
		{"no worker", wrap(payload("dp_rank", 0)), wire.ErrPayload},
		{"a worker of nil", wrap(payload("worker_id", nil)), wire.ErrPayload},
		{"a worker twice", wrap(payload("worker_id", 7, "worker_id", 8)), wire.ErrPayload},
		{"a worker of text", wrap(payload("worker_id", "7")), wire.ErrPayload},
		{"below zero", wrap(payload("worker_id", 7, "kv_used_blocks", -1)), wire.ErrPayload},
		{"a fraction", wrap(payload("worker_id", 7, "kv_used_blocks", 0.5)), wire.ErrPayload},
		{"the rank that means any", wrap(payload("worker_id", 7, "dp_rank", worker.AnyDP)), wire.ErrPayload},
		{"a rank beyond 32 bits", wrap(payload("worker_id", 7, "dp_rank", 1<<32)), wire.ErrPayload},
		{"a number for a key", wrap(payload(msgp.Raw{1}, 7, "worker_id", 7)), wire.ErrPayload},
		{"more than it holds", wrap([]byte("\xdf\xff\xff\xff\xff")), wire.ErrPayload},
		{"unknown key, endless", wrap(payload("x", msgp.Raw("\xdd\xff\xff\xff\xff"), "worker_id", 7)), wire.ErrPayload},
		{"unknown key, deep and cut", wrap(payload("worker_id", 7, "x", msgp.Raw(deep[:8000]))), wire.ErrPayload},
		{"bytes after the payload", wrap(append(good, 0)), wire.ErrPayload},
	} {
		got, err := wire.ParseLoad(tt.frames)
		if !errors.Is(err, tt.want) || got != (wire.LoadEvent{}) {
			t.Errorf("%s: ParseLoad = %s, %v, want nothing and %v", tt.name, show(got), err, tt.want)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%s: the error has %d bytes: %.80s", tt.name, len(err.Error()), err)
		}
	}
	if _, err := wire.ParseLoad(wrap(payload("x", msgp.Raw(deep), "worker_id", 7))); err != nil {
		t.Errorf("an unknown key with deep nesting: %v, want it skipped", err)
	}
}

// FuzzLoadEvent: no bytes make the parser panic or take memory out of proportion, and what it
// accepts is what the frames say.
func FuzzLoadEvent(f *testing.F) {
	for _, frames := range [][][]byte{vector(f), wrap(unhex(f, workerPayload)), wrap(payload("worker_id", 7, "x", []any{1})), framed(nil)} {
		f.Add(frames[0], frames[1], frames[2], frames[3], true)
	}
	p := unhex(f, workerPayload)
	f.Add([]byte{}, []byte{}, []byte{}, p, false)
	f.Fuzz(func(t *testing.T, topic, publisher, sequence, body []byte, whole bool) {
		frames := [][]byte{topic, publisher, sequence, body}
		if !whole { // body is a payload, so that the fuzzer gets past the envelope
			frames = wrap(body)
		}
		size := 0
		for _, frame := range frames {
			size += len(frame)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		e, err := wire.ParseLoad(frames)
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > uint64(4*size+8<<10) {
			t.Errorf("%d bytes made ParseLoad allocate %d", size, took)
		}
		if err != nil {
			return
		}
		if string(frames[0]) != "kv_metrics" || e.Publisher != binary.BigEndian.Uint64(frames[1]) ||
			e.Sequence != binary.BigEndian.Uint64(frames[2]) || e.Rank.DP == worker.AnyDP {
			t.Errorf("frames %q accepted as %s", frames, show(e))
		}
		if !strings.Contains(string(frames[3]), "worker_id") {
			t.Errorf("frames %q name no worker, accepted as %s", frames, show(e))
		}
	})
}

func BenchmarkParseLoad(b *testing.B) {
	frames := vector(b)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := wire.ParseLoad(frames); err != nil {
			b.Fatal(err)
		}
	}
}
