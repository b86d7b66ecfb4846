package main

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"spillway/configs"
)

// writes keeps what each write to a log was.
type writes struct {
	mu    sync.Mutex
	texts []string
}

func (w *writes) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.texts = append(w.texts, string(b))
	return len(b), nil
}

// lines is how many lines each write had.
func (w *writes) lines() (n []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.texts {
		n = append(n, strings.Count(t, "\n"))
	}
	return n
}

func TestLogWaitsForMoreButNotLong(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		synctest.Test(t, func(t *testing.T) {
			var w writes
			log, flush := newLogger(&w, configs.Log{LogFormat: format, LogLevel: "info"})
			want := func(when string, counts ...int) {
				t.Helper()
				synctest.Wait()
				if got := w.lines(); len(got) != len(counts) || len(got) > 0 && got[len(got)-1] != counts[len(counts)-1] {
					t.Errorf("%s, %s: lines of each write = %v, want %v", format, when, got, counts)
				}
			}
			log.Info("request")
			log.With("model", "m").Info("request")
			want("at once")
			time.Sleep(logPause)
			want("after the pause", 2)
			log.Info("request")
			log.WithGroup("g").Warn("circuit")
			want("with a warning", 2, 2)
			log.Info("request")
			flush()
			want("flushed", 2, 2, 1)
			time.Sleep(time.Minute)
			want("later", 2, 2, 1)
			log.Info("request")
			time.Sleep(logPause)
			want("after a quiet minute", 2, 2, 1, 1)
		})
	}
}

func TestLogWaitsInBoundedMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w writes
		log, flush := newLogger(&w, configs.DefaultLog())
		for range 2000 {
			log.Info("request", "text", strings.Repeat("x", 100))
		}
		flush()
		total := 0
		for i, text := range w.texts {
			if len(text) > logBytes {
				t.Errorf("write %d has %d bytes, want at most %d", i, len(text), logBytes)
			}
			total += strings.Count(text, "\n")
		}
		if total != 2000 || len(w.texts) > 20 {
			t.Errorf("%d lines in %d writes, want all 2000 in few", total, len(w.texts))
		}
	})
}
