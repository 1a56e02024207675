package group

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// snapshot is the members' buckets as a reply showed them, for refusals without a request. See the snapshot of internal/engine.
//
// Invariants: it is dropped when this process gives permits back, and replaced by every reply. It is used for engine.SnapshotAge.
type snapshot struct {
	sent    time.Duration // clock.Mono
	members []engine.Seen // Terms are nil for a member that refuses nothing
}

// show keeps a snapshot of the members in which a request would wait, and drops it if there are none. mu must be held.
func (p *Participant) show(f *flight) {
	if f.late || p.Immediate {
		return
	}
	s := &snapshot{sent: f.began, members: make([]engine.Seen, len(p.members))}
	some := false
	for k := range f.parts {
		if !f.parts[k].decided {
			continue
		}
		for _, m := range p.Parts[k] {
			out := &f.batch[m].Outcome
			b, own := &out.Bucket, p.Members[m].Limiter.Own
			if b.Next <= out.NowMicros && b.Stored >= 1 || !b.Terms.Same(own) && b.Terms.Version <= own.Version || len(p.members[m].refunds) > 0 {
				continue
			}
			s.members[m] = engine.Seen{Terms: b.Terms, Balance: b.Balance, Now: max(out.ClockMicros, out.NowMicros)}
			some = true
		}
	}
	if !some {
		s = nil
	}
	p.snapshot.Store(s)
}

// Refuses reports whether a request cannot be granted within maxWait by the last reply, by which member, and how long it would wait at least. It needs
// no lock.
func (p *Participant) Refuses(n, maxWait int64) (member int, wait int64, refused bool) {
	s := p.snapshot.Load()
	if s == nil || !p.local.System() {
		return 0, 0, false
	}
	age := clock.Mono() - s.sent + time.Microsecond
	for m := range s.members {
		refuses, least := false, int64(0)
		if s.members[m].Terms != nil {
			least, refuses = s.members[m].Refuses(n*p.Members[m].Weight, maxWait, age)
		}
		switch {
		case refuses && p.Choice == permit.All:
			return m, least, true
		case !refuses && p.Choice == permit.Any:
			return 0, 0, false
		case refuses && (!refused || least < wait):
			member, wait, refused = m, least, true
		}
	}
	return member, wait, refused
}

// Seen returns the bucket of a member as the snapshot shows it.
func (p *Participant) Seen(member int) engine.Seen {
	if s := p.snapshot.Load(); s != nil {
		return s.members[member]
	}
	return engine.Seen{}
}
