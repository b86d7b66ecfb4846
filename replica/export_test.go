package replica

import (
	"log/slog"
	"time"
)

// BoundBytes sets how much may wait to be sent.
func (r *Replica) BoundBytes(out int) { r.out.maxBytes = out }

// Patience sets how long slow peers are waited for.
func (r *Replica) Patience(d time.Duration) { r.patience = d }

// Origin is the identity that r sends.
func (r *Replica) Origin() uint64 { return r.origin }

// Connected is the number of peers that there is a connection with.
func (r *Replica) Connected() int { return int(r.connected.Load()) }

// BindWhere makes r bind the endpoint at which it would be told about its nth connection, which fails.
func (r *Replica) BindWhere(n int) { r.cfg.Bind = r.eventsOf(n) }

// Log sets where r logs.
func (r *Replica) Log(log *slog.Logger) { r.log = log }
