package main

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/proxy"
	"spillway/router"
	"spillway/tokenize"
	"spillway/worker"
)

// tellTokens has the workers of routes tell server the tokens of prompts. It returns what closes the
// connections for that.
func tellTokens(cfg tokenize.Config, routes *router.Router, server *proxy.Server, reg prometheus.Registerer, log *slog.Logger) (closeAll func()) {
	tokens := tokenize.New(cfg, askable(routes), reg, log)
	server.TokenizeBy(proxy.Tokenizer{
		Tokenize: func(ctx context.Context, p proxy.Prompt) proxy.Tokens {
			t := tokens.Tokenize(ctx, tokenize.Prompt{
				Model: p.Partition.Model, Tenant: p.Partition.Tenant, Served: p.Served, Chat: p.Chat, Body: p.Body,
			})
			return proxy.Tokens{IDs: t.IDs, Count: t.Count, Rough: !t.Text}
		},
		Counted: func(p worker.Partition, counted, actual uint64) { tokens.Counted(p.Model, p.Tenant, counted, actual) },
	})
	return tokens.Close
}

// askable offers the workers that know a model: those that are free, beginning at another one each
// time, then those that are busy.
func askable(routes *router.Router) tokenize.Workers {
	var turn atomic.Uint64
	return func(p *tokenize.Prompt, ask func(tokenize.Worker) bool) {
		key := worker.Partition{Model: p.Model, Tenant: p.Tenant}
		part, catalog := routes.Partition(key), routes.Catalog()
		name, known := catalog.Resolve(p.Served, p.Tenant)
		if part == nil || !known || name.Partition != key {
			return
		}
		snap, first := part.Busy.Snapshot(), turn.Add(1)
		offer := func(ids []worker.ID, but []worker.ID) (more bool) {
			for i := range ids {
				id := ids[(first+uint64(i))%uint64(len(ids))]
				if _, skip := slices.BinarySearch(but, id); skip {
					continue
				}
				w := catalog.Find(id)
				if w == nil || name.Narrowed && !among(name.Workers, id) {
					continue
				}
				if !ask(tokenize.Worker{ID: uint64(w.ID), Name: w.Name, Endpoint: w.Endpoint, APIKey: w.APIKey, SGLang: w.Engine == "sglang"}) {
					return false
				}
			}
			return true
		}
		_ = offer(snap.Free, nil) && offer(snap.Routable, snap.Free)
	}
}

// among tells whether a worker is in a list by ID.
func among(workers []*worker.Worker, id worker.ID) bool {
	_, found := slices.BinarySearchFunc(workers, id, func(w *worker.Worker, id worker.ID) int { return cmp.Compare(w.ID, id) })
	return found
}
