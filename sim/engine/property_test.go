package engine_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/sim/engine"
)

// life is what a test has seen of one request.
type life struct {
	want  int // output tokens
	fits  bool
	got   int
	ended int
}

func TestRandomCallsKeepTheBooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := engine.Config{
			PrefillTokensPerSecond: rapid.Float64Range(100, 1e5).Draw(t, "rate"),
			ITL:                    time.Duration(rapid.IntRange(1, 20).Draw(t, "itl")) * time.Millisecond,
			ITLGrowth:              rapid.Float64Range(0, 2).Draw(t, "growth"),
			MaxNumSeqs:             rapid.IntRange(1, 6).Draw(t, "seqs"),
			BlockSize:              rapid.IntRange(1, 5).Draw(t, "block"),
			KVBlocks:               rapid.IntRange(1, 24).Draw(t, "blocks"),
			PrefillStallsDecode:    rapid.Bool().Draw(t, "stalls"),
			Speed:                  1,
		}
		now := start
		e := must(engine.New(cfg, now))
		lives := map[uint64]*life{}
		var last time.Time
		see := func(events []engine.Event) {
			for _, ev := range events {
				if ev.At.Before(last) || ev.At.After(now) {
					t.Fatalf("event %+v after one at %v, now %v", ev, last, now)
				}
				last = ev.At
				l := lives[ev.ID]
				switch ev.Kind {
				case engine.FirstToken, engine.Token:
					l.got++
					if ev.Generated != l.got || (ev.Kind == engine.FirstToken) != (l.got == 1) {
						t.Fatalf("token %+v, want number %d", ev, l.got)
					}
				case engine.Finished:
					l.ended++
					if l.got != ev.Generated || (ev.Reason == engine.Complete) != (l.got == l.want) {
						t.Fatalf("finished %+v, got %d of %d tokens", ev, l.got, l.want)
					}
					if (ev.Reason == engine.Complete) != l.fits {
						t.Fatalf("finished %+v of a request that fits: %v", ev, l.fits)
					}
				}
			}
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
		}
		id := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"submit": func(t *rapid.T) {
				id++
				// Few different tokens, so that prompts share prefixes.
				prompt := rapid.SliceOfN(rapid.Uint32Range(0, 1), 1, 40).Draw(t, "prompt")
				out := rapid.IntRange(0, 30).Draw(t, "output")
				err := e.Submit(engine.Request{
					ID: id, Prompt: prompt, Output: make([]uint32, out),
					Priority: rapid.IntRange(-1, 1).Draw(t, "priority"),
				}, now)
				room := cfg.KVBlocks * cfg.BlockSize
				if (err != nil) != (len(prompt) > room) {
					t.Fatalf("Submit of %d tokens into %d: %v", len(prompt), room, err)
				}
				if err == nil {
					// The last token needs no room.
					lives[id] = &life{want: out, fits: len(prompt)+max(out, 1)-1 <= room}
				}
			},
			"abort": func(t *rapid.T) {
				victim := uint64(rapid.IntRange(1, int(id)+1).Draw(t, "id"))
				_, found := e.Abort(victim, now)
				see(e.Advance(now, nil))
				l := lives[victim]
				if want := l != nil && l.ended == 0; found != want {
					t.Fatalf("Abort(%d) = %v, want %v", victim, found, want)
				}
				if found {
					l.ended++
				}
			},
			"advance": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 50_000_000).Draw(t, "ns")))
				see(e.Advance(now, nil))
			},
			"step": func(t *rapid.T) {
				if due, ok := e.Next(); ok && due.After(now) {
					now = due
				}
				see(e.Advance(now, nil))
			},
		})
		for {
			due, ok := e.Next()
			if !ok {
				break
			}
			if due.After(now) {
				now = due
			}
			see(e.Advance(now, nil))
		}
		for id, l := range lives {
			if l.ended != 1 {
				t.Errorf("request %d ended %d times with %d of %d tokens", id, l.ended, l.got, l.want)
			}
		}
		if st := e.Stats(); st.UsedBlocks != 0 || st.Running() != 0 || st.Waiting != 0 {
			t.Errorf("at the end: %+v", st)
		}
	})
}
