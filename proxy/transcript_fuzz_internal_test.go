package proxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"spillway/kvhash"
)

// respelled is a body that says the same: blanks are between its words, and letters are written by their numbers.
// Where keep says so it stays as it is.
func respelled(body string, keep []part) string {
	var b strings.Builder
	quoted := false
	for i := 0; i < len(body); i++ {
		ch := body[i]
		kept := slices.ContainsFunc(keep, func(p part) bool { return p.asWritten && p.from <= i && i < p.to })
		switch {
		case kept:
			quoted = quoted != (ch == '"') // in step: a kept part is a whole value
			b.WriteByte(ch)
			if ch == '\\' {
				i++
				b.WriteByte(body[i])
			}
		case quoted && ch == '\\':
			n, _ := escape([]byte(body[i:]))
			b.WriteString(body[i : i+n])
			i += n - 1
		case ch == '"':
			quoted = !quoted
			b.WriteByte(ch)
		case quoted && ch >= ' ' && ch < 0x7f:
			fmt.Fprintf(&b, `\u%04x`, ch)
		case !quoted && strings.IndexByte("{}[],:", ch) >= 0:
			fmt.Fprintf(&b, " %c\n", ch)
		default:
			b.WriteByte(ch)
		}
	}
	return b.String()
}

// FuzzTranscript reads bodies as each route does: what is hashed is bounded, and the same however the body is
// written.
func FuzzTranscript(f *testing.F) {
	for _, s := range scanSeeds {
		f.Add([]byte(s))
	}
	for _, s := range []string{
		`{"messages":[{"role":"user","content":"\ud83d\ude00 \ud800x"}],"tools":[{"a" : "\\"}],"functions":[1]}`,
		`{"prompt":["a","b\n"],"model":"m"}`, `{"input":[{"type":"message","content":[{"text":"x"}]}],"instructions":"do","tools":[{}]}`,
		`{"messages":[{"content":"m"}],"system":[{"type":"text","text":"s"}],"max_tokens":1}`, `{"prompt":[1,2,4294967296,[3]]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for ep := range endpoints {
			s, refusal := judged(ep, string(body))
			if refusal != "" {
				continue
			}
			hash := func(s *scanned, body string, most int) (blocks []uint64, words int) {
				var text kvhash.Text
				text.Reset(kvhash.Options{BlockSize: 1}, most)
				s.write([]byte(body), &text)
				return slices.Clone(text.Blocks()), text.Tokens()
			}
			whole, words := hash(s, string(body), 1<<20)
			if first, n := hash(s, string(body), 3); n != words || !slices.Equal(first, whole[:min(3, len(whole))]) {
				t.Errorf("%q as %s: no more than 3 blocks are %d, of %d words, want the first of %d, of %d", body, endpoints[ep].label, len(first), n, len(whole), words)
			}
			if ids, _ := s.appendIDs(nil, body, 5); len(ids) > 5 {
				t.Errorf("%q as %s: %d token IDs, want 5 at most", body, endpoints[ep].label, len(ids))
			}
			if s.reads.media > 0 {
				continue // they are told apart by how they are written
			}
			other := respelled(string(body), s.parts[:])
			o, refusal := judged(ep, other)
			if refusal != "" {
				t.Fatalf("%q as %s is taken, and written as %q it is not: %s", body, endpoints[ep].label, other, refusal)
			}
			if again, _ := hash(o, other, 1<<20); !slices.Equal(again, whole) {
				t.Errorf("%q as %s is hashed as %d blocks, and written as %q as others, %d", body, endpoints[ep].label, len(whole), other, len(again))
			}
		}
	})
}
