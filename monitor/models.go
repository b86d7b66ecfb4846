package monitor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"spillway/worker"
)

const (
	modelsInterval = 30 * time.Second // between looks at the names of a worker that has some
	modelsTimeout  = 5 * time.Second
	firstRetry     = 250 * time.Millisecond // doubled up to lastRetry
	lastRetry      = 5 * time.Second
	maxModels      = 4096 // names of one worker
)

// ErrNoModels means that a worker answered but named no model.
var ErrNoModels = errors.New("monitor: the worker names no model")

// Discover asks a worker once for the models it serves and returns its record with Models, the
// base model first, Aliases and MaxModelLen filled in. Models that are there already stay. It
// returns ErrNoModels, or an error of the connection, and then w unchanged. It may be called
// whether or not Run is running.
func (m *KvWorkerMonitor) Discover(ctx context.Context, w worker.Worker) (worker.Worker, error) {
	told, err := m.models(ctx, &w)
	if err != nil {
		return w, err
	}
	if len(w.Models) == 0 {
		w.Models = told.names
	}
	w.Aliases, w.MaxModelLen = told.aliases(w.Models), told.length
	return w, nil
}

// served is what a worker tells of the models that it serves.
type served struct {
	names  []string          // base models first
	roots  map[string]string // of base models: what was loaded, which is the same for all names of one
	length uint64            // context of the first
}

// aliases are those of names, after the first, by which a worker knows the same base model. Adapters
// have a parent, and a root of their own. A worker that tells no roots has not told of aliases.
func (s *served) aliases(names []string) (same []string) {
	root := s.roots[names[0]]
	for _, n := range names[1:] {
		if root != "" && s.roots[n] == root {
			same = append(same, n)
		}
	}
	return same
}

// models asks for the names of the models that a worker serves.
func (m *KvWorkerMonitor) models(ctx context.Context, w *worker.Worker) (told served, err error) {
	ctx, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	var answer struct {
		Data []struct {
			ID          string   `json:"id"`
			Root        string   `json:"root"`
			Parent      *string  `json:"parent"`
			MaxModelLen *float64 `json:"max_model_len"`
		} `json:"data"`
	}
	url := w.Endpoint + "/v1/models"
	err = m.get.get(ctx, url, w.APIKey, "application/json", func(body []byte, whole bool) error {
		if err := json.Unmarshal(body, &answer); err != nil {
			return fmt.Errorf("%s: %w", url, err)
		}
		return nil
	})
	if err != nil {
		return told, fmt.Errorf("monitor: asking for models: %w", err)
	}
	told.roots = map[string]string{}
	var adapters []string
	for _, d := range answer.Data {
		base := d.Parent == nil || *d.Parent == ""
		switch {
		case d.ID == "" || slices.Contains(told.names, d.ID) || slices.Contains(adapters, d.ID):
			continue
		case len(told.names)+len(adapters) == maxModels:
			return told, fmt.Errorf("monitor: %s names more than %d models", url, maxModels)
		case !base:
			adapters = append(adapters, d.ID)
			continue
		}
		if n := d.MaxModelLen; len(told.names) == 0 && n != nil && *n > 0 && *n <= maxCount {
			told.length = uint64(*n)
		}
		told.names = append(told.names, d.ID)
		told.roots[d.ID] = d.Root
	}
	if told.names = append(told.names, adapters...); len(told.names) == 0 {
		return told, fmt.Errorf("%w: %s", ErrNoModels, url)
	}
	return told, nil
}

// learn keeps the names and the context length of a worker up to date until ctx ends.
func (m *KvWorkerMonitor) learn(ctx context.Context, w *watch) {
	if m.Register == nil || !pause(ctx, spread(w.id, firstRetry)) {
		return
	}
	retry := firstRetry
	problem := ""
	for {
		err := m.refresh(ctx, w)
		if ctx.Err() != nil {
			return
		}
		record, list := w.target()
		switch {
		case err != nil && err.Error() != problem:
			problem = err.Error()
			m.log.Warn("worker's models are not known", "worker", record.Name, "err", err)
		case err == nil && problem != "":
			problem = ""
			m.log.Info("worker's models are known", "worker", record.Name, "models", record.Models)
		}
		wait := modelsInterval
		if list == nil {
			wait, retry = retry, min(2*retry, lastRetry)
		}
		if !pause(ctx, wait) {
			return
		}
	}
}

// refresh asks for the names once and registers the worker anew if they, which of them are aliases, or
// the context length, have changed.
func (m *KvWorkerMonitor) refresh(ctx context.Context, w *watch) error {
	record, _ := w.target()
	told, err := m.models(ctx, record)
	if err != nil {
		return err
	}
	next := w.renamed(told)
	if next == nil {
		return nil
	}
	defer w.named()
	list, err := m.Register(next)
	if err != nil {
		return fmt.Errorf("monitor: registering: %w", err)
	}
	w.mu.Lock()
	if w.naming == next && !w.gone {
		w.adoptLocked(next, list)
	}
	w.mu.Unlock()
	m.poke()
	return nil
}

// renamed is the record with what has been learnt, or nil if that is nothing new. A length of
// 0 was not said and changes nothing.
func (w *watch) renamed(told served) *worker.Worker {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := *w.record
	if w.learns {
		next.Models = told.names
	}
	if told.length > 0 {
		next.MaxModelLen = told.length
	}
	next.Aliases = told.aliases(next.Models)
	same := next.MaxModelLen == w.record.MaxModelLen && slices.Equal(next.Models, w.record.Models) && slices.Equal(next.Aliases, w.record.Aliases)
	if w.gone || same && w.list != nil {
		return nil
	}
	w.naming = &next
	return w.naming
}

func (w *watch) named() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.naming = nil
}
