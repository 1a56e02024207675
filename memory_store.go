package tokenbucket

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// MemoryStore keeps buckets in this process. It is for limiters of one process, and for tests. It decides by the clock of the limiter that
// sends the batch ([WithClock]), and by the system's clock for a Batch that a wrapper has created. The zero value is ready; it is safe for
// concurrent use and must not be copied.
type MemoryStore struct {
	mu      sync.Mutex
	buckets map[string]*memoryBucket
	names   []string // the keys of buckets, in any order
	next    int      // index in names of the bucket that sweep looks at next
}

// memoryBucket is a bucket of a MemoryStore. It keeps the state as a value, since deciding on text takes several times as long.
//
// The fields that a grant writes come first, followed by those of the state, so a grant moves two cache lines from core to core instead of
// three. The padding makes the bucket four cache lines long, so no two buckets share one.
type memoryBucket struct {
	mu      sync.Mutex
	touched int64 // when the state was last changed, in microseconds
	renewed bool  // of state, for the limiter that last changed it; see PermitBucket.renewed
	swept   bool  // the bucket is no longer in the map
	state   PermitBucket
	text    []byte // the state if it was written as text; nil if state holds it
	ttl     int64  // how long text lives, in microseconds
	_       [32]byte
}

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore { return &MemoryStore{} }

// Apply implements [Store].
func (s *MemoryStore) Apply(_ context.Context, b *Batch) error {
	if g := b.joint(); g != nil {
		return g.answered(s.decideGroup(g.Group))
	}
	asked := b.native()
	if asked == nil {
		return s.exchange(b)
	}
	return asked.answered(s.decide(asked.Batch))
}

// decide decides a batch of the engine, and sets its outcome.
func (s *MemoryStore) decide(batch *permit.Batch) error {
	now := batch.LocalMicros()
	b := s.lock(batch.Key, now)
	defer b.mu.Unlock()
	next := b.state
	if b.text != nil {
		if err := next.parse(string(b.text), batch.Terms); err != nil {
			return corruptBucket(batch.Name, err)
		}
	}
	err := next.apply(now, batch, &batch.Outcome)
	if err == nil && batch.Outcome.Changed {
		b.state, b.text = next, nil
		b.touched, b.renewed = batch.Outcome.NowMicros, b.state.renewed(batch)
	}
	return err
}

// decideGroup decides the batches of a group, and sets their outcomes. It locks the buckets in the order of their keys, so that two groups cannot
// deadlock.
func (s *MemoryStore) decideGroup(g *permit.Group) error {
	n := len(g.Members)
	now := g.Members[0].LocalMicros()
	order := byKey(n, func(i int) string { return g.Members[i].Key })
	held := make([]*memoryBucket, n)
	next := make([]PermitBucket, n)
	buckets := make([]*PermitBucket, n)
	for _, i := range order {
		held[i] = s.lock(g.Members[i].Key, now)
		defer held[i].mu.Unlock()
	}
	for i, b := range held {
		buckets[i] = &next[i]
		if next[i] = b.state; b.text != nil {
			if err := next[i].parse(string(b.text), g.Members[i].Terms); err != nil {
				return corruptBucket(g.Members[i].Name, err)
			}
		}
	}
	if err := applyTogether(now, g, buckets); err != nil {
		return err
	}
	for i, b := range held {
		if batch := g.Members[i]; batch.Outcome.Changed {
			b.state, b.text = next[i], nil
			b.touched, b.renewed = batch.Outcome.NowMicros, b.state.renewed(batch)
		}
	}
	return nil
}

// byKey returns the indexes of n buckets in the order of their keys.
func byKey(n int, key func(i int) string) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return strings.Compare(key(a), key(b)) })
	return order
}

// exchange decides a batch on states as text, of several buckets together.
func (s *MemoryStore) exchange(batch *Batch) error {
	names := batch.Names
	buckets := make(map[string]*memoryBucket, len(names))
	for _, name := range slices.Sorted(slices.Values(names)) { // in one order, so that two batches cannot deadlock
		b := s.lock(name, time.Now().UnixMicro())
		defer b.mu.Unlock()
		buckets[name] = b
	}
	now := time.Now().UnixMicro() // read under the locks: it does not run backwards from one step to the next
	states := make([][]byte, len(names))
	for i, name := range names {
		states[i] = buckets[name].bytes()
	}
	next, ttl, err := batch.Decide(now, states)
	if err != nil {
		return err
	}
	for i, name := range names {
		if next[i] != nil {
			b := buckets[name]
			b.state, b.text = PermitBucket{}, slices.Clone(next[i])
			b.touched, b.ttl = now, ttl.Microseconds()
		}
	}
	return nil
}

// bytes returns the state as text, or nil if there is none. b.mu must be held.
func (b *memoryBucket) bytes() []byte {
	if b.text != nil || b.state.Epoch == 0 {
		return slices.Clone(b.text)
	}
	return b.state.appendText(nil)
}

// expires returns when the state may be dropped. b.mu must be held.
func (b *memoryBucket) expires() int64 {
	if b.text != nil {
		return b.touched + b.ttl
	}
	_, least := b.state.ttlMillis(b.touched, b.renewed)
	return b.touched + least*1000
}

// lock returns the bucket locked.
func (s *MemoryStore) lock(name string, now int64) *memoryBucket {
	for {
		b := s.bucket(name, now)
		b.mu.Lock()
		if !b.swept {
			return b
		}
		b.mu.Unlock()
	}
}

func (s *MemoryStore) bucket(name string, now int64) *memoryBucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.buckets[name]
	if b == nil {
		if s.buckets == nil {
			s.buckets = make(map[string]*memoryBucket)
		}
		s.sweep(now)
		b = &memoryBucket{touched: now}
		s.buckets[name] = b
		s.names = append(s.names, name)
	}
	return b
}

// sweepSteps is how many buckets are examined for each new one. So all of them are examined while their number grows by a quarter.
const sweepSteps = 4

// sweep drops expired buckets among the next few. s.mu must be held.
func (s *MemoryStore) sweep(now int64) {
	for range min(sweepSteps, len(s.names)) {
		s.next %= len(s.names)
		name := s.names[s.next]
		b := s.buckets[name]
		if !b.mu.TryLock() { // a bucket in use is not idle
			s.next++
			continue
		}
		if b.swept = b.expires() < now; b.swept {
			delete(s.buckets, name)
			last := len(s.names) - 1
			s.names[s.next], s.names[last] = s.names[last], ""
			s.names = s.names[:last]
		} else {
			s.next++
		}
		b.mu.Unlock()
	}
}

func (s *MemoryStore) describe() traits {
	return traits{self: s, decides: engine.LimiterClock, memory: s}
}

// immediate decides the batches of the engine by a MemoryStore. It implements [engine.Store].
type immediate struct{ store *MemoryStore }

// Decide implements [engine.Store].
func (s immediate) Decide(_ context.Context, b *permit.Batch) error { return s.store.decide(b) }

// takeNow decides a request in a MemoryStore without the queue, if the permits are due at once or too late. It takes one lock, reads the
// clock once, and allocates nothing except for a reservation. While there are waiters it grants nothing.
func (l *RateLimiter) takeNow(v verb, n, maxWait int64) (got verdict, decided bool) {
	passage := l.limiter.Coordinator.Passage()
	if passage == engine.Queue || l.limiter.Replaced.Load() {
		return verdict{}, false
	}
	now := l.time.Micros()
	b := l.lockBucket(now)
	if b == nil {
		return verdict{}, false
	}
	inForce := l.inForce()
	if passage == engine.Refusals {
		seen := b.state
		b.mu.Unlock()
		return l.refuseNow(v, &seen, now, inForce, n, maxWait)
	}
	var place *permit.Place
	if v == reserve {
		place = new(permit.Place)
	}
	wait, granted, decided := b.state.takeNow(now, inForce, n, maxWait, place)
	if granted {
		b.granted(l, inForce, now)
	}
	var r *Reservation
	switch {
	case v == await && granted:
		r = l.awaited(permit.Origin{Epoch: b.state.Epoch, ID: b.state.Seq})
	case v == reserve && decided:
		r = l.reserved(&b.state, max(now, b.state.SeenMicros), granted, place, wait-maxWait)
	}
	b.mu.Unlock()
	if granted && v != reserve && l.priority != Normal { // see Coordinator.LookAhead for reservations
		l.limiter.Coordinator.Spend(n)
	}
	return verdict{granted: granted, wait: time.Duration(wait) * time.Microsecond, reservation: r}, decided
}

// inForce returns the configuration in force if a reply has shown it, and else the limiter's own.
func (l *RateLimiter) inForce() *setting {
	if t := l.limiter.InForce(); t != &l.own.terms {
		return settingOf(t)
	}
	return l.own
}

// lockBucket locks the limiter's bucket in its MemoryStore and returns it; nil if the bucket was swept.
func (l *RateLimiter) lockBucket(now int64) *memoryBucket {
	b := l.slot.Load()
	if b == nil {
		b = l.memory.bucket(l.limiter.Coordinator.Key, now)
		l.slot.Store(b)
	}
	b.mu.Lock()
	if b.swept {
		b.mu.Unlock()
		l.slot.Store(nil)
		return nil
	}
	return b
}

// granted records a grant of takeNow to a limiter.
func (b *memoryBucket) granted(l *RateLimiter, inForce *setting, now int64) {
	b.touched = now
	b.renewed = b.state.forgettable(l.limiter.Initial, l.limiter.Transient) && (inForce == l.own || inForce.sameContent(&l.own.config))
}

// refuseNow decides a request while there are waiters: it may be refused, but not granted. b is a copy of the bucket.
func (l *RateLimiter) refuseNow(v verb, b *PermitBucket, now int64, inForce *setting, n, maxWait int64) (got verdict, decided bool) {
	wait, granted, decided := b.takeNow(now, inForce, n, maxWait, nil)
	if granted || !decided {
		return verdict{}, false
	}
	if got.wait = time.Duration(wait) * time.Microsecond; v == reserve {
		got.reservation = l.reserved(b, max(now, b.SeenMicros), false, nil, wait-maxWait)
	}
	return got, true
}

// reserved returns the reservation that takeNow has decided.
func (l *RateLimiter) reserved(b *PermitBucket, now int64, granted bool, place *permit.Place, retryAfter int64) *Reservation {
	level := b.setting.level(b.balance(), now)
	if !granted {
		return refusedReservation(retryAfter, level)
	}
	back := place.Refund(&b.setting.terms, 0)
	return &Reservation{call: engine.Reserved(&l.limiter, place.Origin(), &back), level: level}
}

// maxNow bounds the members that takeNow of a group decides on, because it copies their states.
const maxNow = 8

// takeNow decides a request for members in one MemoryStore without the queue, if each of them is due at once or too late. It locks their buckets in
// the order of decideGroup. It must not be called while a call of the group is in progress.
func (g *several) takeNow(c *counted, n, maxWait int64, a *answer) (decided bool) {
	var held [maxNow]*memoryBucket
	defer func() {
		for _, b := range held {
			if b != nil {
				b.mu.Unlock()
			}
		}
	}()
	now := g.members[c.indexes[0]].limiter.time.Micros()
	for _, at := range c.locks {
		if held[at] = g.members[c.indexes[at]].limiter.lockBucket(now); held[at] == nil {
			return false
		}
	}
	var next [maxNow]PermitBucket
	first, grants, refused, wait := -1, 0, -1, int64(0)
	for at, i := range c.indexes {
		w := g.members[i]
		next[at] = held[at].state
		late, granted, decided := next[at].takeNow(now, w.limiter.inForce(), n*w.permits, maxWait, nil)
		switch {
		case !decided:
			return false
		case granted:
			if grants++; first < 0 {
				first = at
			}
		case refused < 0 || c.Tells(late, wait):
			refused, wait = i, late
		}
	}
	switch {
	case g.choice == permit.Any && first >= 0:
		g.keep(c, first, now, held[first], &next[first])
	case grants == len(c.indexes):
		for at := range c.indexes {
			g.keep(c, at, now, held[at], &next[at])
		}
	default:
		a.refused, a.wait = refused, time.Duration(wait)*time.Microsecond
		return true
	}
	a.granted, a.member = true, first
	return true
}

// keep writes the state of a member whose permits were taken.
func (g *several) keep(c *counted, at int, now int64, b *memoryBucket, next *PermitBucket) {
	b.state = *next
	l := g.members[c.indexes[at]].limiter
	b.granted(l, l.inForce(), now)
}
