package tokenbucket

import (
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
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
			return err
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
			return err
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
