package proxy

import (
	"slices"
	"time"

	"spillway/router"
	"spillway/worker"
)

// BookingStage is what has happened to a booking.
type BookingStage uint8

// The stages of a booking.
const (
	Booked      BookingStage = iota + 1 // the request was placed
	PrefillDone                         // its prompt has been computed, or is taken to be
	Freed                               // it has ended
)

// Booking tells of one change that a request has made in the books.
type Booking struct {
	Stage     BookingStage
	Partition worker.Partition
	ID        string // of the reservation, random
	Rank      worker.Rank
	BlockSize uint32 // tokens per KV block of the worker

	PrefillTokens uint64   // at Booked: prompt tokens to compute
	Hashes        []uint64 // at Booked: sequence hashes of the prompt's blocks, where requests share them; the receiver's
	DecodeBlocks  uint64   // at Booked: further KV blocks of the prompt
}

// Share has tell called at each change that a request makes in the books, in the order of the
// changes of that request. What the output adds is not told. tell is part of the request's way, so it
// must not wait for anything. Share is called before Run.
func (s *Server) Share(tell func(Booking)) { s.share = tell }

// shareBooked tells of the booking of x.
func (s *Server) shareBooked(x *exchange) {
	if s.share == nil {
		return
	}
	b := Booking{
		Stage: Booked, Partition: x.slot.part.Key, ID: x.slot.id, Rank: x.sel.Booked, BlockSize: x.sel.BlockSize,
		PrefillTokens: x.promised(), DecodeBlocks: x.sel.DecodeBlocks,
	}
	if x.query.SequenceHashes != nil {
		b.Hashes = slices.Clone(x.query.SequenceHashes)
		b.DecodeBlocks = x.query.PrivateBlocks
	}
	s.share(b)
}

// endPrefill notes in the books that the prompt of a request has been computed.
func (s *Server) endPrefill(part *router.Partition, id string, now time.Time) {
	if rank, ok := part.PrefillDone(id, now); ok && s.share != nil {
		s.share(Booking{Stage: PrefillDone, Partition: part.Key, ID: id, Rank: rank, BlockSize: part.Busy.BlockSize(rank.Worker)})
	}
	s.letGo(part, now)
}

// free gives back what is booked for a request.
func (s *Server) free(part *router.Partition, id string, now time.Time) {
	if rank, ok := part.Free(id, now); ok && s.share != nil {
		s.share(Booking{Stage: Freed, Partition: part.Key, ID: id, Rank: rank, BlockSize: part.Busy.BlockSize(rank.Worker)})
	}
	s.letGo(part, now)
}
