package group

import (
	"sync/atomic"
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

// view keeps the last snapshot of the members' buckets. Only show and drop need the participant's mu.
type view struct {
	snapshot atomic.Pointer[snapshot] // nil if a request might be granted at once
	config   *Config
	system   bool // the limiter's clock is the system's
}

// drop forgets the snapshot, because permits go back.
func (v *view) drop() { v.snapshot.Store(nil) }

// show keeps a snapshot of the members in which a request would wait, and drops it if there are none. mu must be held.
func (v *view) show(f *flight, members []member) {
	if f.late || v.config.Immediate {
		return
	}
	s := &snapshot{sent: f.began, members: make([]engine.Seen, len(members))}
	some := false
	for k := range f.parts {
		if !f.parts[k].decided {
			continue
		}
		for _, m := range f.parts[k].members {
			out := &f.batch[m].Outcome
			b, own := &out.Bucket, members[m].Limiter.Own
			if b.Next <= out.NowMicros && b.Stored >= 1 || !b.Terms.Same(own) && b.Terms.Version <= own.Version || len(members[m].refunds) > 0 {
				continue
			}
			s.members[m] = engine.Seen{Terms: b.Terms, Balance: b.Balance, Now: max(out.ClockMicros, out.NowMicros)}
			some = true
		}
	}
	if !some {
		s = nil
	}
	v.snapshot.Store(s)
}

// refuses is [Participant.Refuses].
func (v *view) refuses(n, maxWait int64) (member int, wait int64, refused bool) {
	s := v.snapshot.Load()
	if s == nil || !v.system {
		return 0, 0, false
	}
	age := clock.Mono() - s.sent + time.Microsecond
	for m := range s.members {
		refuses, least := false, int64(0)
		if s.members[m].Terms != nil {
			least, refuses = s.members[m].Refuses(n*v.config.Members[m].Weight, maxWait, age)
		}
		switch {
		case !refuses && v.config.Choice == permit.Any:
			return 0, 0, false
		case refuses && (!refused || tells(v.config.Choice, least, wait)):
			member, wait, refused = m, least, true
		}
	}
	return member, wait, refused
}

// seen returns the bucket of a member as the snapshot shows it.
func (v *view) seen(member int) engine.Seen {
	if s := v.snapshot.Load(); s != nil {
		return s.members[member]
	}
	return engine.Seen{}
}
