package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	sweepEvery  = time.Second // expired and cancelled messages at the heads of queues
	sweepHeads  = 100
	reapAtOnce  = 100
	renewAtOnce = 500
	maxBeat     = 30 * time.Second
)

// heartbeats renews the leases of messages in hand, and looks for cancellations of them.
func (d *Dispatcher) heartbeats(ctx context.Context) {
	beat := time.NewTicker(min(d.cfg.LeaseTTL/3, maxBeat))
	defer beat.Stop()
	look := time.NewTicker(d.cfg.CancelPoll)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
			d.beat(ctx)
		case <-look.C:
			d.lookForCancelled(ctx)
		}
	}
}

// inHand lists the leases by queue.
func (d *Dispatcher) inHand() map[*Queue][]*lease {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := map[*Queue][]*lease{}
	for l := range d.held {
		all[l.queue] = append(all[l.queue], l)
	}
	return all
}

func (d *Dispatcher) beat(ctx context.Context) {
	for q, held := range d.inHand() {
		for len(held) > 0 {
			n := min(len(held), renewAtOnce)
			timed, cancel := context.WithTimeout(ctx, queryTimeout)
			lost, err := d.store.renew(timed, q, held[:n], d.cfg.LeaseTTL)
			cancel()
			if err != nil && ctx.Err() == nil {
				d.metrics.redisErrors.Add(1)
				d.log.Warn("leases cannot be renewed; requests go on", "queue", q.Name, "err", err)
			}
			for _, l := range lost {
				if d.isHeld(l) {
					q.lost.Add(1)
					d.log.Warn("a lease was lost: its request is cancelled", "queue", q.Name, "id", l.m.id)
					d.end(l, errFenced)
				}
			}
			held = held[n:]
		}
	}
}

// isHeld tells that a lease is in hand, and not being given up.
func (d *Dispatcher) isHeld(l *lease) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.held[l]
	return ok && !l.ending.Load()
}

func (d *Dispatcher) lookForCancelled(ctx context.Context) {
	for _, held := range d.inHand() {
		var all []*message
		of := map[*message]*lease{}
		for _, l := range held {
			all = append(all, l.m)
			of[l.m] = l
		}
		timed, cancel := context.WithTimeout(ctx, queryTimeout)
		found, err := d.store.cancelled(timed, all)
		cancel()
		if err != nil {
			continue // next time
		}
		for m := range found {
			d.end(of[m], errClientCancelled)
		}
	}
}

// sweeps does what does not depend on the gate: takes messages back whose time has come or whose
// process is gone, and settles those that are expired or cancelled.
func (d *Dispatcher) sweeps(ctx context.Context) {
	poll := time.NewTicker(time.Duration(d.transport.PollMS) * time.Millisecond)
	defer poll.Stop()
	// Owners that live come first after an outage.
	grace := func(now time.Time) time.Time { return now.Add(2 * d.cfg.LeaseTTL / 3) }
	reap, sweep, measure, report := grace(time.Now()), time.Now(), time.Now(), time.Now()
	away, told := false, time.Time{}
	for {
		now := time.Now()
		var failed error
		if !d.cfg.DryRun {
			failed = d.promote(ctx)
			if failed == nil && !now.Before(sweep) {
				failed = d.sweepHeads(ctx, now)
				sweep = now.Add(sweepEvery)
			}
			if failed == nil && !now.Before(reap) {
				failed = d.reap(ctx)
				reap = now.Add(d.cfg.ReapInterval)
			}
		}
		if failed == nil && d.cfg.BacklogPoll > 0 && !now.Before(measure) {
			failed = d.measure(ctx)
			measure = now.Add(min(d.cfg.BacklogPoll, time.Minute))
		}
		if failed == nil && d.cfg.BudgetLog > 0 && !now.Before(report) {
			if failed = d.measure(ctx); failed == nil {
				d.report(now)
			}
			report = now.Add(d.cfg.BudgetLog)
		}
		if failed != nil && ctx.Err() == nil {
			d.metrics.redisErrors.Add(1)
			if !away || now.Sub(told) >= time.Minute {
				d.log.Warn("Redis does not answer as it should", "err", failed)
				told = now
			}
			reap = grace(time.Now())
		} else if away {
			d.log.Info("Redis answers again")
		}
		away = failed != nil
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
		}
	}
}

func (d *Dispatcher) promote(ctx context.Context) error {
	for _, q := range d.queues {
		n, err := d.store.promote(ctx, q, reapAtOnce)
		if err != nil {
			return err
		}
		if n > 0 {
			d.nudge()
		}
	}
	return nil
}

func (d *Dispatcher) sweepHeads(ctx context.Context, now time.Time) error {
	for _, q := range d.queues {
		found, err := d.store.peek(ctx, q, sweepHeads)
		if err != nil {
			return err
		}
		var alive []*message
		for _, z := range found {
			raw, _ := z.Member.(string)
			m, bad := parse(raw, z.Score)
			gone, err := d.hopeless(ctx, q, m, bad, now)
			if err != nil {
				return err
			}
			if !gone {
				alive = append(alive, m)
			}
		}
		cancelled, err := d.store.cancelled(ctx, alive)
		if err != nil {
			return err
		}
		for m := range cancelled {
			if err := d.reject(ctx, q, m, failed(codeCancelled, "cancelled"), nil); err != nil {
				return err
			}
		}
		if err := d.sweepDelayed(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

// sweepDelayed has cancelled messages that wait for their next attempt be due, so that the heads are
// looked at.
func (d *Dispatcher) sweepDelayed(ctx context.Context, q *Queue) error {
	gids, err := d.store.redis.ZRange(ctx, q.keys.delayed, 0, sweepHeads-1).Result()
	if err != nil || len(gids) == 0 {
		return err
	}
	bodies, err := d.store.redis.HMGet(ctx, q.keys.body, gids...).Result()
	if err != nil {
		return err
	}
	var all []*message
	gid := map[*message]string{}
	for i, b := range bodies {
		raw, _ := b.(string)
		if m, bad := parse(raw, 0); bad == nil {
			all = append(all, m)
			gid[m] = gids[i]
		}
	}
	cancelled, err := d.store.cancelled(ctx, all)
	if err != nil {
		return err
	}
	for m := range cancelled {
		if err := d.store.redis.ZAddXX(ctx, q.keys.delayed, redis.Z{Member: gid[m]}).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (d *Dispatcher) reap(ctx context.Context) error {
	for _, q := range d.queues {
		back, often, err := d.store.reap(ctx, q, reapAtOnce, d.cfg.MaxDeliveries)
		if err != nil {
			return err
		}
		if back > 0 {
			d.log.Info("requests of a process that is gone go back into their queue", "queue", q.Name, "requests", back)
			d.nudge()
		}
		for _, o := range often {
			r := failed(codeDeliveries, "delivery limit exceeded")
			err := d.store.settle(ctx, settlement{
				queue: q, m: o.m, token: o.token, expired: true, list: d.listOf(q, o.m),
				result: r.append(nil, o.m, q, o.m.retries, "", d.cfg.ResultExtras, time.Now()),
				dead:   &deadLetter{reason: deadDeliveries, deliveries: o.n, attempts: o.m.attempts},
			})
			if err == nil {
				q.letter(deadDeliveries)
				d.step(Settled, o.m)
			} else if !errors.Is(err, errFenced) {
				return err
			}
		}
	}
	return nil
}

// measure looks how much the queues hold.
func (d *Dispatcher) measure(ctx context.Context) error {
	for _, q := range d.queues {
		found, err := d.store.depth(ctx, q)
		if err != nil {
			return err
		}
		q.depth.Store(&found)
	}
	return nil
}

// report logs the budgets of queues that hold something, so that what was free, and what became of it,
// can be computed from the log: requests, retries and sheds count from the start.
func (d *Dispatcher) report(now time.Time) {
	for _, g := range d.groups {
		var pending, delayed, leased int64
		var first, retried, succeeded, shed uint64
		for _, q := range g.queues {
			depth := q.depth.Load()
			pending, delayed, leased = pending+depth.pending, delayed+depth.delayed, leased+depth.leased
			first, retried = first+q.first.Load(), retried+q.retried.Load()
			succeeded, shed = succeeded+q.outcomes[outcomeSuccess].Load(), shed+q.outcomes[outcomeShed].Load()
		}
		dec := g.decide(now)
		if pending+delayed+leased == 0 && dec.InFlight == 0 {
			continue
		}
		d.log.Info("budget", append(g.tells(dec), "pending", pending, "delayed", delayed,
			"requests", first, "retries", retried, "successful", succeeded, "shed", shed)...)
	}
}

// importRetries takes over what llm-d's processor has put aside.
func (d *Dispatcher) importRetries(ctx context.Context) {
	total := 0
	for {
		all, err := d.store.redis.ZRangeWithScores(ctx, d.transport.RetryQueue, 0, reapAtOnce-1).Result()
		if err != nil || len(all) == 0 {
			if err != nil {
				d.log.Error("retries cannot be imported", "imported", total, "err", err)
			} else {
				d.log.Info("retries were imported", "imported", total)
			}
			return
		}
		for _, z := range all {
			raw, _ := z.Member.(string)
			m, _ := parse(raw, 0) // what is malformed is dealt with when it is due
			q := d.queues[0]
			for _, other := range d.queues {
				if other.Name == m.queue {
					q = other
				}
			}
			left := max(0, int64(z.Score*1000)-time.Now().UnixMilli())
			err := importScript.Run(ctx, d.store.redis, q.keys.list(), m.gid, raw, max(0, m.deadline.Unix()), left).Err()
			if err == nil {
				err = d.store.redis.ZRem(ctx, d.transport.RetryQueue, raw).Err()
			}
			if err != nil {
				d.log.Error("retries cannot be imported", "imported", total, "err", err)
				return
			}
			total++
		}
	}
}
