package tokenbucket

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// applyTogether decides the batches of a group at nowMicros of the store's clock, on the buckets of its members. It is PermitBucket.apply for
// several buckets, and internal/redisbucket/lua/group.lua is its translation. The states must be written only if it returns nil, all of them or
// none; a state whose outcome is not Changed need not be written.
//
// The joint requests are decided in order. Each one is granted if every member could grant its part by itself within its longest wait (permit.All),
// or if one member could (permit.Any). A refusal changes no bucket.
func applyTogether(nowMicros int64, g *permit.Group, buckets []*PermitBucket) error {
	for i, b := range buckets {
		batch := g.Members[i]
		if err := b.open(nowMicros, batch, &batch.Outcome); err != nil {
			return &permit.Fault{Member: i, Err: err}
		}
	}
	for i, b := range buckets {
		batch := g.Members[i]
		b.decideAll(batch, batch.Requests[:len(batch.Requests)-g.Joint], &batch.Outcome)
	}
	for i := range g.Joint {
		decideJoint(g, buckets, i)
	}
	for i, b := range buckets {
		if err := b.close(g.Members[i], &g.Members[i].Outcome); err != nil {
			return &permit.Fault{Member: i, Err: err}
		}
	}
	return nil
}

// decideJoint decides the i-th joint request of a group.
func decideJoint(g *permit.Group, buckets []*PermitBucket, i int) {
	first, fits := -1, 0 // the member due first, and the number of those that could grant their part
	for m, b := range buckets {
		r := g.Request(m, i)
		r.Grant = b.quote(g.Members[m].Outcome.NowMicros, r.Permits)
		if r.Grant.Overflow || r.Grant.WaitMicros > r.MaxWaitMicros {
			continue
		}
		if fits++; first < 0 || r.Grant.WaitMicros < g.Request(first, i).Grant.WaitMicros {
			first = m
		}
	}
	switch {
	case g.Choice == permit.Any && first >= 0:
		takeJoint(g, buckets[first], first, i)
	case g.Choice == permit.All && fits == len(buckets):
		for m, b := range buckets {
			takeJoint(g, b, m, i)
		}
	}
}

// takeJoint takes a member's part of the i-th joint request, which its bucket has quoted.
func takeJoint(g *permit.Group, b *PermitBucket, member, i int) {
	r, batch := g.Request(member, i), g.Members[member]
	r.Grant = b.take(batch.Outcome.NowMicros, r.Permits, r.MaxWaitMicros, batch.Nonce())
	batch.Outcome.Changed = true
}

// inquiry carries the batches of a group through a [Store], as question does for a single batch.
type inquiry struct {
	*permit.Group
	public  Batch
	decided bool // the outcomes are those of these batches
}

// decider has the batches of a part of a group decided by a store.
type decider struct {
	store  Store
	traits traits
	until  script.Until
	spare  atomic.Pointer[inquiry] // for the next batches; nil while it is in use
}

// decide decides the batches of a group until a time.
func (d *decider) decide(until time.Time, g *permit.Group) error {
	q := d.spare.Swap(nil)
	if q == nil {
		q = new(inquiry)
	}
	ctx := context.Background()
	switch {
	case d.traits.memory != nil:
	case d.traits.bounded:
		ctx = d.until.Context(until)
	default:
		c, cancel := context.WithDeadline(ctx, until)
		defer cancel()
		ctx = c
	}
	err := q.ask(ctx, d.store, g)
	d.spare.Store(q)
	return err
}

// askTogether has a store decide the batches of a group in one step.
func askTogether(ctx context.Context, s Store, g *permit.Group) error {
	return new(inquiry).ask(ctx, s, g)
}

func (q *inquiry) ask(ctx context.Context, s Store, g *permit.Group) error {
	if q.public.together != q || len(q.public.Names) != len(g.Members) {
		q.public = Batch{Names: make([]string, len(g.Members)), Decide: q.decide, together: q}
	}
	q.Group, q.decided = g, false
	for i, b := range g.Members {
		q.public.Names[i], b.Outcome = b.Key, permit.Outcome{}
	}
	err := s.Apply(ctx, &q.public)
	if err == nil && !q.decided {
		err = fmt.Errorf("tokenbucket: bucket %q: %T has not called Decide", g.Members[0].Name, s)
	}
	return err
}

// joint returns the inquiry behind a batch that came as the engine made it, or nil.
func (b *Batch) joint() *inquiry {
	if b.together == nil || b != &b.together.public {
		return nil
	}
	return b.together
}

// answered records that a store of this module has decided the batches itself.
func (q *inquiry) answered(err error) error {
	q.decided = err == nil
	return err
}

// decide is the Decide function of the public batch.
func (q *inquiry) decide(now int64, states [][]byte) (next [][]byte, ttl time.Duration, err error) {
	q.decided = false
	n := len(q.Members)
	if len(states) != n {
		return nil, 0, fmt.Errorf("tokenbucket: bucket %q: %d states: want one for each of the %d names", q.Members[0].Name, len(states), n)
	}
	buckets := make([]*PermitBucket, n)
	for i, b := range q.Members {
		buckets[i] = new(PermitBucket)
		if err := buckets[i].parse(string(states[i]), b.Terms); err != nil {
			return nil, 0, &permit.Fault{Member: i, Err: corruptBucket(b.Name, err)}
		}
	}
	if err := applyTogether(now, q.Group, buckets); err != nil {
		return nil, 0, err
	}
	q.decided = true
	next = make([][]byte, n)
	for i, b := range q.Members {
		if b.Outcome.Changed {
			millis, _ := buckets[i].ttlMillis(b.Outcome.NowMicros, buckets[i].renewed(b))
			next[i], ttl = buckets[i].appendText(nil), max(ttl, time.Duration(millis)*time.Millisecond)
		}
	}
	return next, ttl, nil
}
