package busy

import (
	"slices"

	"spillway/worker"
)

// Snapshot is one picture of a List. It never changes; when its content would, another takes
// its place. IDs are sorted.
type Snapshot struct {
	Registered []worker.ID
	Routable   []worker.ID // registered, healthy, not inhibited, circuit closed, not draining
	Busy       []worker.ID // every rank is over a threshold or marked; routable or not
	Marked     []worker.ID // every rank is marked for backpressure
	// Free are the workers to choose from: routable and not busy. Without thresholds nobody is
	// busy, and marked workers are left out as long as others are routable.
	Free []worker.ID

	RegisteredSlots []int32 // of Registered, in its order
	RoutableSlots   []int32 // of Routable, in its order
	FreeSlots       []int32 // of Free, in its order
	SlotCount       int     // every slot is less

	ThresholdsSet bool
}

// Snapshot returns the present picture. It takes no lock.
func (l *List) Snapshot() *Snapshot { return l.snapshot.Load() }

// amendLocked replaces the snapshot after the verdict on one worker has changed. What stays as
// it was is shared with the last snapshot: near a threshold every request may change a verdict.
func (l *List) amendLocked(e *entry) {
	s := *l.snapshot.Load()
	if !s.ThresholdsSet { // then a mark on one worker can decide on the others
		l.publishLocked()
		return
	}
	s.Routable, s.RoutableSlots = amended(s.Routable, s.RoutableSlots, e, e.routable)
	s.Busy, _ = amended(s.Busy, nil, e, e.busy)
	s.Marked, _ = amended(s.Marked, nil, e, e.allMarked)
	s.Free, s.FreeSlots = amended(s.Free, s.FreeSlots, e, e.routable && !e.busy)
	l.snapshot.Store(&s)
}

// amended returns ids, and slots beside them if there are any, with the worker in or out. What
// is given stays as it is.
func amended(ids []worker.ID, slots []int32, e *entry, in bool) ([]worker.ID, []int32) {
	i, found := slices.BinarySearch(ids, e.id)
	if found == in {
		return ids, slots
	}
	rest := i
	if found {
		rest++
	}
	more := make([]worker.ID, 0, len(ids)+1)
	more = append(more, ids[:i]...)
	if in {
		more = append(more, e.id)
	}
	more = append(more, ids[rest:]...)
	if slots == nil {
		return more, nil
	}
	places := make([]int32, 0, len(slots)+1)
	places = append(places, slots[:i]...)
	if in {
		places = append(places, int32(e.slot))
	}
	return more, append(places, slots[rest:]...)
}

// publishLocked replaces the snapshot by one made from scratch.
func (l *List) publishLocked() {
	n := len(l.order)
	s := &Snapshot{
		Registered: make([]worker.ID, 0, n), RegisteredSlots: make([]int32, 0, n),
		Routable: make([]worker.ID, 0, n), RoutableSlots: make([]int32, 0, n),
		Free: make([]worker.ID, 0, n), FreeSlots: make([]int32, 0, n),
		SlotCount: len(l.slots), ThresholdsSet: l.thresholds.Any(),
	}
	avoidMarked := false
	if !s.ThresholdsSet {
		for _, e := range l.order {
			if e.routable && !e.allMarked {
				avoidMarked = true
				break
			}
		}
	}
	for _, e := range l.order {
		slot := int32(e.slot)
		s.Registered, s.RegisteredSlots = append(s.Registered, e.id), append(s.RegisteredSlots, slot)
		if e.busy {
			s.Busy = append(s.Busy, e.id)
		}
		if e.allMarked {
			s.Marked = append(s.Marked, e.id)
		}
		if !e.routable {
			continue
		}
		s.Routable, s.RoutableSlots = append(s.Routable, e.id), append(s.RoutableSlots, slot)
		if !e.busy && !(avoidMarked && e.allMarked) {
			s.Free, s.FreeSlots = append(s.Free, e.id), append(s.FreeSlots, slot)
		}
	}
	l.snapshot.Store(s)
}
