package tokenbucket

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

const (
	// keptMillis is how long a store keeps the state of a full bucket at least, and spareMillis how much longer it does, so that most
	// writes can leave the key's time to live alone.
	keptMillis, spareMillis = 86_400_000, 3_600_000
	// renewedKept and renewedSpare are the same for a state that a new bucket would equal (PermitBucket.renewed).
	renewedKept, renewedSpare = 30_000, 30_000

	// shortfall is the share of a permit whose lack is overlooked: less than this is float noise, and a permit
	// that exists must not wait for a microsecond because of it. It is remembered in the carry, so nothing is minted.
	shortfall = 1e-9

	// noiseMicros is how much of a time may be float noise, however long the interval is: a nanosecond.
	noiseMicros = 1e-3

	// standstillMicros is how far the store's clock may fall behind the latest time seen before it is believed.
	standstillMicros = 2_000_000

	// maxSeq leaves a batch room to count beyond it exactly.
	maxSeq = maxExact / 2
)

// resync is PermitBucket.ReSync on a balance of a bucket that holds at most so much.
func (s *setting) resync(m permit.Balance, now int64, most float64) permit.Balance {
	if now > m.Next {
		m.Stored = min(most, m.Stored+float64(now-m.Next)/s.coolDown(s.interval, s.max))
		m.Next = now
	}
	return m
}

// PermitBucket is the shared state of one bucket, together with the configuration in force. All numbers are in
// permits or microseconds of the store's clock. The zero value is a bucket that does not exist yet. It is not safe
// for concurrent use: stores keep it behind a lock, and what users get is a copy.
type PermitBucket struct {
	Name string
	// MaxPermits is the most permits that can be stored.
	MaxPermits float64
	// StoredPermits were saved up while nobody asked; 0 … MaxPermits, fractional.
	StoredPermits float64
	// IntervalMicros between two permits: 1e6 / rate.
	IntervalMicros float64
	// NextFreeTicketMicros is when the bucket owes nothing any more; later than now means it is in debt.
	NextFreeTicketMicros int64
	// CarryMicros, below 1, is what costs were rounded up by and what the next request will pay less.
	CarryMicros float64
	// SeenMicros is the latest time that the bucket has seen; of what [RateLimiter.State] returns, the time of the answer.
	SeenMicros int64
	// Epoch names what refunds may refer to. It changes with a new state, a reset, a clock that was set back, a
	// configuration replaced without a new version, and whenever the bucket overflows: from then on an older refund
	// would add permits that the full bucket could not have kept.
	Epoch int64
	// Seq counts changes; it is the version that a fenced write compares, and numbers what is granted.
	Seq int64
	// Tail is the tag of the newest grant if that was not given back, and 0 if that is unknown. See [place].
	Tail int64
	// HeldUntilMicros is until when Penalize holds the bucket back: until then nothing falls due but what was due before.
	HeldUntilMicros int64
	// PausedMicros is the time that the bucket was held back for altogether: what was granted before falls due that much later.
	PausedMicros int64
	// ReturnedPermits came back into the store out of turn in this epoch.
	ReturnedPermits float64
	// Rate in permits per second, and Version of the configuration in force; 0: it has none.
	Rate    float64
	Version int64
	// WarmupMicros is the warm-up period; 0: the bucket is bursty.
	WarmupMicros int64

	setting  *setting // in force; nil if the bucket does not exist
	returned []int64  // places whose stored permits came back in this epoch
}

// adopt puts a configuration in force.
func (b *PermitBucket) adopt(s *setting) {
	b.setting = s
	b.MaxPermits, b.IntervalMicros = s.max, s.interval
	b.Rate, b.Version, b.WarmupMicros = s.Rate, s.Version, s.WarmupMicros
}

// newEpoch is a random name. What refers to an older epoch is at most seconds old, so 40 bits are plenty, and short.
func newEpoch() int64 { return rand.Int64N(1<<40) + 1 }

// beginEpoch forgets every place handed out so far: none of them can be given back any more.
func (b *PermitBucket) beginEpoch(epoch int64) {
	b.Epoch, b.Tail, b.ReturnedPermits, b.returned = epoch, 0, 0, nil
}

// ReSync brings the bucket to nowMicros: the time since it owed nothing becomes stored permits, fractions included.
func (b *PermitBucket) ReSync(nowMicros int64) { b.resync(nowMicros) }

// Take takes permits from this copy of a bucket, at a time of the store's clock, if they fall due within maxWait. It returns how long that
// takes; of a refusal, how long it would have taken. Nothing else sees it: it answers what-if questions about a [RateLimiter.State].
func (b *PermitBucket) Take(nowMicros int64, permits int, maxWait time.Duration) (wait time.Duration, granted bool) {
	if b.Epoch == 0 || permits < 1 {
		return 0, false
	}
	asked := permit.Batch{Name: b.Name, Terms: &b.setting.terms, Epoch: b.Epoch,
		Requests: []permit.Request{{Op: permit.Take, Permits: int64(permits), MaxWaitMicros: max(0, maxWait.Microseconds())}}}
	if err := b.apply(nowMicros, &asked, &asked.Outcome); err != nil {
		return 0, false
	}
	g := &asked.Requests[0].Grant
	return time.Duration(g.WaitMicros) * time.Microsecond, g.OK
}

// coolDown is the time, in microseconds, in which the idle bucket stores one permit.
func (b *PermitBucket) coolDown() float64 {
	if b.WarmupMicros > 0 {
		return float64(b.WarmupMicros) / b.MaxPermits
	}
	return b.IntervalMicros
}

// resync reports whether permits were lost because the bucket was full.
func (b *PermitBucket) resync(now int64) (overflow bool) {
	if now > b.NextFreeTicketMicros {
		b.StoredPermits += float64(now-b.NextFreeTicketMicros) / b.coolDown()
		b.NextFreeTicketMicros = now
	}
	overflow = b.StoredPermits > b.MaxPermits
	b.StoredPermits = min(b.StoredPermits, b.MaxPermits)
	return overflow
}

// apply decides a batch at nowMicros of the store's clock. Nothing else changes a bucket but takeNow, which decides the simple cases as
// apply does. internal/redisbucket/lua/apply.lua is its translation, equal to the last bit. The state must be written only if the outcome says Changed.
func (b *PermitBucket) apply(nowMicros int64, batch *permit.Batch, out *permit.Outcome) error {
	if nowMicros < -maxExact || nowMicros > maxExact {
		return invalid(batch.Name, wanted("clock", nowMicros, "microseconds from -2^53 to 2^53"))
	}
	*out = permit.Outcome{ClockMicros: nowMicros}
	b.Name = batch.Name
	if batch.Probe {
		out.NowMicros = nowMicros
		return nil
	}
	if b.Epoch == 0 {
		newest := settingOf(batch.Terms)
		if known := batch.Known; known != nil && known.Version > newest.Version && settingOf(known).Kind == newest.Kind {
			newest = settingOf(known)
		}
		b.begin(nowMicros, batch, newest)
		out.Changed = len(batch.Requests) > 0
	} else {
		nowMicros = b.observe(nowMicros, batch.Epoch, out)
		if !replaces(batch, b.setting.Kind) {
			if err := b.reconcile(nowMicros, batch, out); err != nil {
				return err
			}
		}
	}
	if b.resync(nowMicros) {
		b.beginEpoch(batch.Epoch)
	}
	for i := range batch.Requests {
		r := &batch.Requests[i]
		r.Grant = b.decide(nowMicros, r, batch)
		out.Changed = out.Changed || r.Grant.OK
	}
	if out.Changed && !b.sound() {
		return fmt.Errorf("%w: bucket %q: it would become %+v", ErrCorruptState, batch.Name, b.balance())
	}
	b.show(nowMicros, batch, out)
	return nil
}

// show notes in an outcome what was decided, and when.
func (b *PermitBucket) show(nowMicros int64, batch *permit.Batch, out *permit.Outcome) {
	out.NowMicros = nowMicros
	out.Bucket = permit.Bucket{
		Balance: b.balance(), Epoch: b.Epoch, HeldUntilMicros: b.HeldUntilMicros, PausedMicros: b.PausedMicros, Terms: &b.setting.terms,
	}
	if batch.Read {
		state := *b
		out.State = &state
	}
}

// decide carries out one request of a batch.
func (b *PermitBucket) decide(now int64, r *permit.Request, batch *permit.Batch) permit.Grant {
	switch r.Op {
	case permit.Take:
		return b.take(now, r.Permits, r.MaxWaitMicros, batch.Nonce())
	case permit.TakeStored:
		return b.takeStored(now, r.Permits, batch.Nonce())
	case permit.GiveBack:
		return permit.Grant{OK: b.giveBack(now, &r.Back)}
	case permit.SetRate:
		return permit.Grant{OK: b.setRate(r.Rate, batch.Terms.Version)}
	case permit.SetRateAndBurst:
		return permit.Grant{OK: b.setRateAndBurst(r.Rate, r.MaxPermits, batch.Terms.Version)}
	case permit.Hold:
		return permit.Grant{OK: b.hold(now, r.HoldMicros, batch.Epoch)}
	case permit.Reset:
		b.begin(now, batch, settingOf(batch.Terms))
		return permit.Grant{OK: true}
	}
	return r.Grant
}

// sound tells whether the account may be written: no NaN, no infinity, nothing that the reader would refuse.
func (b *PermitBucket) sound() bool {
	return b.StoredPermits >= 0 && b.StoredPermits <= maxExact && b.ReturnedPermits >= 0 && b.ReturnedPermits <= maxExact &&
		b.CarryMicros >= -maxExact*shortfall && b.CarryMicros <= 1 &&
		b.NextFreeTicketMicros >= -maxExact && b.NextFreeTicketMicros <= maxExact && b.Seq <= maxSeq &&
		b.NextFreeTicketMicros-b.SeenMicros <= maxExact && b.SeenMicros-b.NextFreeTicketMicros <= maxExact &&
		b.HeldUntilMicros >= -maxExact && b.HeldUntilMicros <= maxExact && b.PausedMicros <= maxExact
}

// replaces tells whether the batch begins a bucket of another kind anew: then the old one's configuration does not matter.
func replaces(batch *permit.Batch, kind kind) bool {
	return settingOf(batch.Terms).Kind != kind && len(batch.Requests) > 0 && batch.Requests[0].Op == permit.Reset
}

// begin makes a new bucket.
func (b *PermitBucket) begin(now int64, batch *permit.Batch, s *setting) {
	b.adopt(s)
	b.StoredPermits = b.MaxPermits // warm-up starts cold
	if s.Kind == bursty {
		b.StoredPermits = min(batch.Initial, b.MaxPermits)
	}
	b.NextFreeTicketMicros, b.CarryMicros, b.SeenMicros = now, 0, now
	b.HeldUntilMicros, b.PausedMicros = 0, 0
	b.Seq = 1
	b.beginEpoch(batch.Epoch)
}

// observe returns the time to decide by. A clock up to two seconds behind the latest time seen stands still, so one
// that saw-tooths mints nothing. One further behind was set back: the debt stays what it was relative to it.
func (b *PermitBucket) observe(now, epoch int64, out *permit.Outcome) int64 {
	if behind := b.SeenMicros - now; behind > standstillMicros {
		b.NextFreeTicketMicros -= behind
		if b.PausedMicros > 0 {
			b.HeldUntilMicros -= behind
		}
		b.SeenMicros = now
		b.beginEpoch(epoch) // places of the old time must not fit by chance
		out.Changed = true
	}
	b.SeenMicros = max(b.SeenMicros, now)
	return b.SeenMicros
}

// reconcile puts a configuration in force: the newest version, and of two with the same version the one with the larger content hash.
// As long as nobody has set a version, each batch is decided under its own.
func (b *PermitBucket) reconcile(now int64, batch *permit.Batch, out *permit.Outcome) error {
	mine, theirs := settingOf(batch.Terms), b.setting
	if mine.Kind != theirs.Kind {
		return invalid(batch.Name, wanted("kind", mine.Kind, fmt.Sprintf("%v, as the bucket is, or another name", theirs.Kind)))
	}
	if mine == theirs || mine.config == theirs.config {
		return nil
	}
	switch {
	case mine.Version == 0 && theirs.Version == 0:
		// Stored permits are clipped by the next resync and never scaled up, so two configurations in turn mint nothing. A refund
		// across the change would be measured with two rates, so its epoch ends.
		b.adopt(mine)
		b.beginEpoch(batch.Epoch)
		return nil
	case mine.Version == theirs.Version:
		out.Conflict = true
		if mine.contentHash() <= theirs.contentHash() {
			return nil
		}
		b.beginEpoch(batch.Epoch)
	case mine.Version < theirs.Version:
		return nil
	}
	b.resync(now)
	b.rescale(mine)
	out.Changed = true
	return nil
}

// rescale adopts a configuration and keeps the stored permits in proportion, as Guava's setRate does.
func (b *PermitBucket) rescale(s *setting) {
	old := b.MaxPermits
	b.adopt(s)
	switch {
	case old > 0:
		b.StoredPermits = min(b.MaxPermits, float64(b.StoredPermits*b.MaxPermits)/old)
	case s.Kind == warmingUp:
		b.StoredPermits = b.MaxPermits
	default:
		b.StoredPermits = 0
	}
	b.Seq++
}

// cost of n permits from the account's stored ones, in microseconds, before rounding.
func (k *curve) cost(kind kind, stored, n float64) (micros, spend float64) {
	spend = min(n, stored)
	micros = float64((n - spend) * k.interval)
	if kind == warmingUp {
		micros += k.storedCost(stored, spend)
	}
	return micros, spend
}

// after is the account once n permits were taken from it. The cost is rounded up to whole microseconds, and what it
// was rounded up by is carried to the next request: with exact time V = Next − Carry, V grows by the cost exactly,
// so the long-run rate is exact at every rate, and Next is never more than 1 µs ahead of V.
func (k *curve) after(kind kind, m permit.Balance, n int64) (permit.Balance, bool) {
	cost, spend := k.cost(kind, m.Stored, float64(n))
	need := cost - m.Carry
	add := 0.0
	if need > float64(shortfall*k.interval) {
		add = k.ceil(need)
	}
	if add > maxExact || float64(m.Next)+add > maxExact {
		return m, false
	}
	return permit.Balance{Stored: m.Stored - spend, Next: m.Next + int64(add), Carry: add - need}, true
}

// ceil rounds a time up to whole microseconds. What exceeds them by less than a shortfall, and by less than a nanosecond, is
// overlooked.
func (k *curve) ceil(micros float64) float64 {
	return math.Ceil(micros - min(float64(shortfall*k.interval), noiseMicros))
}

// leastWait is the shortest time after which n permits can fall due, from a full bucket that owes nothing.
func (c *config) leastWait(k *curve, n int64) int64 {
	if c.Payment == PayLater {
		return 0
	}
	m, ok := k.after(c.Kind, permit.Balance{Stored: k.max}, n)
	if !ok {
		return maxExact
	}
	return m.Next
}

func (b *PermitBucket) balance() permit.Balance {
	return permit.Balance{Stored: b.StoredPermits, Next: b.NextFreeTicketMicros, Carry: b.CarryMicros}
}

func (b *PermitBucket) set(m permit.Balance) {
	b.StoredPermits, b.NextFreeTicketMicros, b.CarryMicros = m.Stored, m.Next, m.Carry
}

// take grants n permits if they are due within maxWait, else takes nothing. The bucket is resynced. The grant's tag is its number plus
// the batch's nonce.
func (b *PermitBucket) take(now, n, maxWait, nonce int64) permit.Grant {
	before := b.balance()
	after, ok := b.setting.after(b.setting.Kind, before, n)
	if !ok {
		return permit.Grant{Overflow: true}
	}
	due := after.Next
	if b.setting.Payment == PayLater {
		due = before.Next
	}
	if due-now > maxWait {
		return permit.Grant{WaitMicros: due - now}
	}
	b.set(after)
	b.Seq++
	place := permit.Place{
		Epoch: b.Epoch, Tag: nonce + b.Seq, Prev: b.Tail, ID: b.Seq, Version: b.setting.Version, Before: before, After: after,
	}
	b.Tail = place.Tag
	return permit.Grant{OK: true, WaitMicros: due - now, Place: place}
}

// takeStored grants up to n permits, at least two, of those that are stored: all are due at once.
func (b *PermitBucket) takeStored(now, n, nonce int64) permit.Grant {
	n = int64(min(float64(n), math.Floor(b.StoredPermits+shortfall)))
	if n < 2 {
		return permit.Grant{}
	}
	g := b.take(now, n, 0, nonce)
	if !g.OK && n > 2 { // the last one is short by more than is overlooked
		n--
		g = b.take(now, n, 0, nonce)
	}
	g.Permits = n
	return g
}

// takeNow decides on one request as apply would, and much faster, if the permits are due at once or the request is refused, and s is in
// force. Else it reports that it has decided nothing. It repeats resync and take: change them together (TestTakeNow).
func (b *PermitBucket) takeNow(now int64, s *setting, n, maxWait int64) (granted, decided bool) {
	if b.Epoch == 0 || b.SeenMicros-now > standstillMicros || b.setting != s && b.setting.config != s.config {
		return false, false
	}
	now = max(now, b.SeenMicros)
	at := b.balance()
	if now > at.Next {
		at.Stored += float64(now-at.Next) / s.coolDown(b.IntervalMicros, b.MaxPermits)
		at.Next = now
	}
	overflow := at.Stored > b.MaxPermits
	at.Stored = min(at.Stored, b.MaxPermits)
	after, ok := s.after(s.Kind, at, n)
	if !ok || b.Seq >= maxSeq {
		return false, false
	}
	due := after.Next
	if s.Payment == PayLater {
		due = at.Next
	}
	if due > now {
		return false, due-now > maxWait
	}
	if overflow {
		b.beginEpoch(newEpoch())
	}
	b.set(after)
	b.SeenMicros = now
	b.Seq++
	b.Tail = 0 // permits that are due are not given back
	return true, true
}

// renewed reports whether a bucket that the batch's limiter begins anew would equal this one once it is full: the configuration in force is the
// limiter's own, and the rest can be forgotten.
func (b *PermitBucket) renewed(batch *permit.Batch) bool {
	return b.forgettable(batch.Initial, batch.Transient) && b.setting.sameContent(&settingOf(batch.Terms).config)
}

// forgettable reports whether nothing but the configuration is lost with the state once the bucket is full, for limiters with these initial
// permits. The initial permits must fill the bucket. A version and the sum of penalties are lost, so only a transient bucket may have them.
// A penalty that is not over is debt, so the bucket is not full yet.
func (b *PermitBucket) forgettable(initial float64, transient bool) bool {
	return (transient || b.Version == 0 && b.PausedMicros == 0) && (b.WarmupMicros > 0 || initial >= b.MaxPermits)
}

// ttlMillis returns how long a store keeps the state: the debt, plus the time to fill up, plus a day and an hour. If the state is renewed, a
// minute is enough. A minute is needed since limiters of other configurations may use the same bucket, as during a rolling deployment: each
// loss would give them their initial permits. The state needs only least of that time, so a store need not prolong it with every write.
func (b *PermitBucket) ttlMillis(nowMicros int64, renewed bool) (ttl, least int64) {
	micros := max(0, float64(b.NextFreeTicketMicros-nowMicros)) + float64(b.MaxPermits*b.coolDown())
	full := int64(math.Ceil(min(micros, maxExact) / 1000))
	if renewed {
		return full + renewedKept + renewedSpare, full + renewedKept
	}
	return full + keptMillis + spareMillis, full + keptMillis
}
