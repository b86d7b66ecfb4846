package proxy

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"
)

// stored reads size bytes of a body into m as readBody does, and returns it whole, or nil if there
// was no memory for it.
func stored(m *bodyMemory, announced int64, size int, chance *rand.Rand) []byte {
	b := m.begin(announced)
	for i := range size {
		if b == nil {
			return nil
		}
		if len(b) == cap(b) {
			if b = m.grow(); b == nil {
				return nil
			}
		}
		b = append(b, byte(i*7+i>>8))
		if len(b) > m.claimed || chance != nil && chance.IntN(1<<16) == 0 && m.budget.held.Load() > 2*m.budget.limit {
			panic("more is used than claimed")
		}
	}
	if b == nil {
		return nil
	}
	return m.whole(len(b))
}

func pattern(size int) []byte {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// TestBodyMemoryWhole checks that bodies of all sizes come together again, how much is claimed for
// them, and that all of it is given back.
func TestBodyMemoryWhole(t *testing.T) {
	for _, tt := range []struct {
		size, claimed int
		announced     int64
	}{
		{0, smallPart, 0}, {1, smallPart, 1}, {smallPart - 1, smallPart, smallPart - 1}, {smallPart, smallPart, -1}, {smallPart, midPart, smallPart},
		{smallPart + 1, midPart, -1}, {1, midPart, 40 << 20}, {midPart - 1, midPart, midPart - 1}, {1, largePart, midPart}, {1, largePart, largePart - 1}, {1, midPart, largePart}, {midPart, midPart, -1}, {midPart + 1, largePart, midPart + 1},
		{largePart, largePart, largePart}, {largePart + 1, largePart + 1, largePart + 1}, {1<<20 + 5, 1<<20 + 5, -1},
	} {
		m := bodyMemory{budget: &budget{limit: 4 << 20}}
		got := stored(&m, tt.announced, tt.size, nil)
		if !bytes.Equal(got, pattern(tt.size)) || got == nil {
			t.Errorf("%d bytes, announced as %d, are not what they were", tt.size, tt.announced)
		}
		if m.claimed != tt.claimed || m.budget.held.Load() != int64(tt.claimed) {
			t.Errorf("%d bytes, announced as %d, claim %d and the budget holds %d, want %d", tt.size, tt.announced, m.claimed, m.budget.held.Load(), tt.claimed)
		}
		m.release()
		m.release()
		if m.claimed != 0 || m.budget.held.Load() != 0 {
			t.Errorf("%d bytes: %d claimed and %d held after release, want none", tt.size, m.claimed, m.budget.held.Load())
		}
	}
}

// TestBodyMemoryBelieves: what is announced is believed while memory is plentiful.
func TestBodyMemoryBelieves(t *testing.T) {
	b := budget{limit: 16 * largePart}
	all := make([]bodyMemory, 20)
	got := 0
	for i := range all {
		all[i].budget = &b
		if cap(all[i].begin(midPart)) == largePart {
			got++
		}
	}
	if want := 16 / plenty; got != want {
		t.Errorf("%d of 20 bodies begin with a large part, want %d", got, want)
	}
}

// TestBodyMemoryShares checks that however many bodies take all they get, there is room for one
// more of a third of the smallest of them, which is held twice
// while it is put together.
func TestBodyMemoryShares(t *testing.T) {
	for _, greedy := range []int{1, 2, 3, 10, 50} {
		b := budget{limit: 16 << 20}
		all := make([]bodyMemory, greedy)
		growing := greedy
		for i := range all {
			all[i].budget = &b
			if all[i].begin(-1) == nil {
				t.Fatalf("%d bodies: no room for the first bytes of number %d", greedy, i)
			}
		}
		for growing > 0 {
			growing = 0
			for i := range all {
				if cap(*all[i].chain[len(all[i].chain)-1]) > 0 && all[i].grow() != nil {
					growing++
				}
			}
		}
		least := all[0].claimed
		for i := range all {
			least = min(least, all[i].claimed)
		}
		if fair := int(b.limit) / (greedy + 1); least < fair-2*largePart || least > fair+largePart {
			t.Errorf("%d bodies: the smallest has %d bytes, want about %d", greedy, least, fair)
		}
		small := bodyMemory{budget: &b}
		if stored(&small, -1, least/3, nil) == nil {
			t.Errorf("%d bodies: none of %d bytes has room beside them", greedy, least/3)
		}
		small.release()
		for i := range all {
			all[i].release()
		}
		if held := b.held.Load(); held != 0 {
			t.Errorf("%d bodies: %d bytes are held after all was released", greedy, held)
		}
	}
}

// TestBodyMemoryBound has many bodies grow at once, in a budget that cannot hold them all.
func TestBodyMemoryBound(t *testing.T) {
	b := budget{limit: 2 << 20}
	var all sync.WaitGroup
	var mu sync.Mutex
	kept, refused := 0, 0
	for i := range 16 {
		chance := rand.New(rand.NewPCG(2, uint64(i)))
		all.Go(func() {
			for range 20 {
				m := bodyMemory{budget: &b}
				size := chance.IntN(1 << 20)
				got := stored(&m, int64(chance.IntN(2)*size), size, chance)
				ok := bytes.Equal(got, pattern(size))
				mu.Lock()
				switch {
				case got == nil:
					refused++
				case ok:
					kept++
				default:
					t.Errorf("%d bytes are not what they were", size)
				}
				mu.Unlock()
				m.release()
			}
		})
	}
	all.Wait()
	if held := b.held.Load(); held != 0 || kept == 0 || refused == 0 {
		t.Errorf("%d bytes are held after all was released; %d bodies fitted and %d did not, want none, some and some", held, kept, refused)
	}
}
