package monitor

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// feed plays live batches to a cursor as a listener does. answers, if not nil, is what a replay
// endpoint says when it is asked from a number.
func feed(c *cursor, live []uint64, answers func(from uint64) []uint64) (applied []string, lost uint64, asked []uint64) {
	apply := func(s uint64) {
		ok, n := c.apply(s)
		lost += n
		if ok {
			applied = append(applied, fmt.Sprint(s))
		}
	}
	for _, s := range live {
		a := c.arrive(s)
		if a.restarted {
			applied = append(applied, "clear")
		}
		if a.skip {
			continue
		}
		if a.missing > 0 && answers != nil {
			asked = append(asked, a.from)
			for _, r := range answers(a.from) {
				apply(r)
			}
		}
		apply(s)
	}
	return applied, lost, asked
}

// TestCursor is the table of kv-index.md 4.2. Row 14 is a matter of decoding: for the cursor the
// garbage at 1 is a batch.
func TestCursor(t *testing.T) {
	type row struct {
		name    string
		live    []uint64
		asked   []uint64 // from which numbers a replay is asked for
		answer  []uint64 // of each request; nil: there is nobody to ask
		applied string
		lost    uint64
	}
	none := []uint64{}
	for _, tt := range []row{
		{"1", []uint64{0, 1, 2}, nil, nil, "0 1 2", 0},
		{"2", []uint64{0, 1, 4}, nil, nil, "0 1 4", 2},
		{"3", []uint64{0, 1, 4}, []uint64{2}, []uint64{2, 3, 4}, "0 1 2 3 4", 0},
		{"4", []uint64{0, 1, 4, 5, 6}, []uint64{2}, []uint64{2, 3, 4, 5}, "0 1 2 3 4 5 6", 0},
		{"5", []uint64{5}, []uint64{0}, []uint64{0, 1, 2, 3, 4, 5}, "0 1 2 3 4 5", 0},
		{"6", []uint64{5}, []uint64{0}, []uint64{3, 4, 5}, "3 4 5", 3},
		{"7", []uint64{5}, []uint64{0}, none, "5", 5},
		{"8", []uint64{0, 3}, []uint64{1}, []uint64{1}, "0 1 3", 1},
		{"9", []uint64{0, 4}, []uint64{1}, []uint64{1, 3}, "0 1 3 4", 1},
		{"10", []uint64{0, 3}, []uint64{1}, none, "0 3", 2},
		{"11", []uint64{0, 1, 2, 0, 1}, nil, nil, "0 1 2 clear 0 1", 0},
		{"12", []uint64{7, 8, 9, 3}, nil, nil, "7 8 9 clear 3", 10},
		{"13", []uint64{1, 2}, []uint64{0}, []uint64{1}, "1 2", 0},
		{"14", []uint64{0, 1, 2}, nil, none, "0 1 2", 0},
		{"counts from 1, nobody to ask", []uint64{1, 2}, nil, nil, "1 2", 0},
		{"from 1 after a restart", []uint64{5, 1, 2}, nil, nil, "5 clear 1 2", 5},
		{"0 and 1 missing", []uint64{2}, nil, nil, "2", 2},
		{"one lost later is one", []uint64{0, 2}, nil, nil, "0 2", 1},
		{"the same number again is a restart", []uint64{0, 0}, nil, nil, "0 clear 0", 0},
		{"a replay with old ones", []uint64{0, 1, 3}, []uint64{2}, []uint64{0, 1, 2, 2, 3}, "0 1 2 3", 0},
		{"a restart is asked for from 0", []uint64{0, 9, 4}, []uint64{1, 0}, none, "0 9 clear 4", 12},
		{"the highest number", []uint64{0, 1<<64 - 2}, nil, nil, "0 18446744073709551614", 1<<64 - 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var answers func(uint64) []uint64
			if tt.answer != nil {
				answers = func(uint64) []uint64 { return tt.answer }
			}
			var c cursor
			applied, lost, asked := feed(&c, tt.live, answers)
			if got := strings.Join(applied, " "); got != tt.applied || lost != tt.lost || !slices.Equal(asked, tt.asked) {
				t.Errorf("live %v, answers %v: applied %s, %d lost, asked from %v, want %s, %d, %v",
					tt.live, tt.answer, got, lost, asked, tt.applied, tt.lost, tt.asked)
			}
		})
	}
}

// slowCursor is the same by the letter of kv-index.md 4.2, with lists in place of numbers.
type slowCursor struct {
	live    []uint64 // of this process
	applied map[uint64]bool
	log     []string
	lost    int
}

func (m *slowCursor) next() uint64 {
	next := uint64(0)
	for s := range m.applied {
		next = max(next, s+1)
	}
	return next
}

func (m *slowCursor) apply(s uint64) {
	if s < m.next() {
		return
	}
	began := len(m.applied) == 0
	for gone := m.next(); gone < s; gone++ {
		if !(began && gone == 0 && s == 1) {
			m.lost++
		}
	}
	m.applied[s] = true
	m.log = append(m.log, fmt.Sprint(s))
}

func (m *slowCursor) arrive(s uint64, answers func(uint64) []uint64) {
	if slices.ContainsFunc(m.live, func(old uint64) bool { return s <= old }) {
		m.live, m.applied = nil, map[uint64]bool{}
		m.log = append(m.log, "clear")
	}
	m.live = append(m.live, s)
	if s > m.next() && answers != nil {
		for _, r := range answers(m.next()) {
			m.apply(r)
		}
	}
	m.apply(s)
}

func TestCursorAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		small := rapid.Uint64Range(0, 12)
		live := rapid.SliceOfN(small, 0, 12).Draw(t, "live")
		var answers func(uint64) []uint64
		if rapid.Bool().Draw(t, "replay") {
			ring := rapid.SliceOfN(small, 0, 8).Draw(t, "ring")
			answers = func(from uint64) []uint64 {
				var all []uint64
				for _, s := range ring {
					if s >= from {
						all = append(all, s)
					}
				}
				return all
			}
		}
		var c cursor
		applied, lost, _ := feed(&c, live, answers)
		m := slowCursor{applied: map[uint64]bool{}}
		for _, s := range live {
			m.arrive(s, answers)
		}
		if !slices.Equal(applied, m.log) || lost != uint64(m.lost) {
			t.Fatalf("applied %v, %d lost, want %v, %d", applied, lost, m.log, m.lost)
		}
	})
}
