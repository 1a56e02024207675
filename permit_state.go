package tokenbucket

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

const (
	// keptMillis is how long a store keeps the state of a full bucket at least. spareMillis is added to it, so that most writes can leave
	// the key's time to live unchanged.
	keptMillis, spareMillis = 86_400_000, 3_600_000
	// renewedKept and renewedSpare are the same for a state that a new bucket would equal (PermitBucket.renewed).
	renewedKept, renewedSpare = 30_000, 30_000

	// shortfall is the fraction of a permit that may be missing: less is float noise, and an existing permit must not wait for a
	// microsecond because of it. The missing part is kept in the carry, so nothing is minted.
	shortfall = 1e-9

	// noiseMicros is the largest float noise of a time, however long the interval is: a nanosecond.
	noiseMicros = 1e-3

	// standstillMicros is how far the store's clock may fall behind the latest time seen before the bucket follows it.
	standstillMicros = 2_000_000

	// maxSeq leaves room for a batch to count beyond it exactly.
	maxSeq = maxExact / 2
)

// PermitBucket is the shared state of one bucket, together with the configuration in force. All numbers are in permits or microseconds of
// the store's clock. The zero value is a bucket that does not exist yet. It is not safe for concurrent use: stores keep it behind a lock,
// and users receive a copy.
type PermitBucket struct {
	Name string
	// MaxPermits is the most permits that can be stored.
	MaxPermits float64
	// StoredPermits were saved up while the bucket was idle; 0 … MaxPermits, fractional.
	StoredPermits float64
	// IntervalMicros is the time between two permits: 1e6 / rate.
	IntervalMicros float64
	// NextFreeTicketMicros is when the bucket's debt ends. If it is later than now, the bucket is in debt.
	NextFreeTicketMicros int64
	// CarryMicros, below 1, is the amount by which costs were rounded up. The next request pays that much less.
	CarryMicros float64
	// SeenMicros is the latest time of the store's clock that the bucket has seen. In the result of [RateLimiter.State] it is the time of
	// the reply.
	SeenMicros int64
	// Epoch identifies the places that may be refunded. It changes with a new state, a reset, a penalty, a clock that was set back, a
	// configuration replaced without a new version, and whenever the bucket overflows: from then on an older refund would add permits that
	// the full bucket could not have kept. A penalty, a clock and a configuration keep its lineage, since the bucket has forgotten nothing: a
	// settlement gives back permits of the whole lineage.
	Epoch int64
	// Seq counts changes. A fenced write compares it as the version, and it numbers the grants.
	Seq int64
	// Tail is the tag of the newest grant if that was not given back, and 0 if that is unknown. See [place].
	Tail int64
	// HeldUntilMicros is the end of the latest pause by Penalize. Until then no permit falls due that was not due before the pause.
	HeldUntilMicros int64
	// PausedMicros is the total time of all pauses. Permits granted before a pause fall due that much later.
	PausedMicros int64
	// ReturnedPermits is the number of stored permits given back out of turn in this epoch.
	ReturnedPermits float64
	// Rate, in permits per second, and Version are those of the configuration in force. Version is 0 if it has none.
	Rate    float64
	Version int64
	// WarmupMicros is the warm-up period, 0 for a bursty bucket.
	WarmupMicros int64

	setting *setting // in force; nil if the bucket does not exist
	// returned has the numbers of the places whose stored permits were given back in this epoch, and the latest settlements that gave permits back in
	// this lineage: settlement plus the nonces of their batches.
	returned []int64
}

// adopt puts a configuration in force.
func (b *PermitBucket) adopt(s *setting) {
	b.setting = s
	b.MaxPermits, b.IntervalMicros = s.max, s.interval
	b.Rate, b.Version, b.WarmupMicros = s.Rate, s.Version, s.WarmupMicros
}

// beginEpoch begins an epoch of a new lineage: no earlier place can be given back any more, nor by a settlement.
func (b *PermitBucket) beginEpoch(epoch int64) {
	b.Epoch, b.Tail, b.ReturnedPermits, b.returned = epoch, 0, 0, nil
}

// succeed begins an epoch of the same lineage: no earlier place can be given back any more, except by a settlement.
func (b *PermitBucket) succeed(epoch int64) {
	settled := slices.DeleteFunc(slices.Clone(b.returned), func(id int64) bool { return id < settlement })
	b.beginEpoch(permit.Succeed(b.Epoch, epoch))
	b.returned = settled
}

// ReSync advances the bucket to nowMicros: the time since its debt ended becomes stored permits, fractions included.
func (b *PermitBucket) ReSync(nowMicros int64) { b.resync(nowMicros) }

// Take takes permits from this copy of a bucket, at a time of the store's clock, if they fall due within maxWait. It returns how long that
// takes; for a refusal, how long it would have taken. It changes nothing but the copy, and is for what-if questions about a
// [RateLimiter.State].
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

// coolDown returns the time, in microseconds, in which the idle bucket stores one permit.
func (b *PermitBucket) coolDown() float64 {
	if b.WarmupMicros > 0 {
		return float64(b.WarmupMicros) / b.MaxPermits
	}
	return b.IntervalMicros
}

// resync advances the bucket to now. It reports whether permits were lost because the bucket was full.
func (b *PermitBucket) resync(now int64) (overflow bool) {
	at, overflow := earn(b.balance(), now, b.coolDown(), b.MaxPermits)
	b.set(at)
	return overflow
}

// earn returns a balance at a time: the time since the debt ended becomes stored permits, one in each coolDown, up to most. It reports
// whether permits were lost because the bucket was full.
func earn(m permit.Balance, now int64, coolDown, most float64) (at permit.Balance, overflow bool) {
	if now > m.Next {
		m.Stored += float64(now-m.Next) / coolDown
		m.Next = now
	}
	overflow = m.Stored > most
	m.Stored = min(m.Stored, most)
	return m, overflow
}

// apply decides a batch at nowMicros of the store's clock. Nothing else changes a bucket except takeNow, which decides the simple cases as
// apply does. internal/redisbucket/lua/bucket.lua is its translation, equal to the last bit. The state must be written only if the outcome
// is Changed.
func (b *PermitBucket) apply(nowMicros int64, batch *permit.Batch, out *permit.Outcome) error {
	if err := b.open(nowMicros, batch, out); err != nil || batch.Probe {
		return err
	}
	b.decideAll(batch, batch.Requests, out)
	return b.close(batch, out)
}

// open prepares the bucket for a batch: it exists, its configuration is the one in force, and it is resynced to the time of the decision, which
// open sets in the outcome.
func (b *PermitBucket) open(nowMicros int64, batch *permit.Batch, out *permit.Outcome) error {
	if nowMicros < -maxExact || nowMicros > maxExact {
		return invalid(batch.Name, wanted("clock", nowMicros, "microseconds from -2^53 to 2^53"))
	}
	*out = permit.Outcome{ClockMicros: nowMicros, NowMicros: nowMicros}
	b.Name = batch.Name
	if batch.Probe {
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
		out.NowMicros = b.observe(nowMicros, batch.Epoch, out)
		if !replaces(batch, b.setting.Kind) {
			if err := b.reconcile(out.NowMicros, batch, out); err != nil {
				return err
			}
		}
	}
	if b.resync(out.NowMicros) {
		b.beginEpoch(batch.Epoch)
	}
	batch.Settled = slices.Contains(b.returned, settlement+batch.Nonce())
	return nil
}

// decideAll carries out requests of a batch in order.
func (b *PermitBucket) decideAll(batch *permit.Batch, requests []permit.Request, out *permit.Outcome) {
	for i := range requests {
		r := &requests[i]
		r.Grant = b.decide(out.NowMicros, r, batch)
		out.Changed = out.Changed || r.Grant.OK
	}
}

// close checks the bucket after a batch, and shows it in the outcome.
func (b *PermitBucket) close(batch *permit.Batch, out *permit.Outcome) error {
	if out.Changed && !b.sound() {
		return fmt.Errorf("%w: bucket %q: it would become %+v", ErrCorruptState, batch.Name, b.balance())
	}
	b.show(batch, out)
	return nil
}

// show sets the bucket in an outcome.
func (b *PermitBucket) show(batch *permit.Batch, out *permit.Outcome) {
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
		missing, ok := b.giveBack(now, &r.Back)
		return permit.Grant{OK: ok, Permits: int64(math.Ceil(max(0, missing-shortfall)))}
	case permit.SetRate:
		return permit.Grant{OK: b.setRate(r.Rate, batch.Terms.Version)}
	case permit.SetRateAndBurst:
		return permit.Grant{OK: b.setRateAndBurst(r.Rate, r.MaxPermits, batch.Terms.Version)}
	case permit.Hold:
		return permit.Grant{OK: b.hold(now, r.HoldMicros, batch.Epoch)}
	case permit.Settle:
		return b.settle(now, r.Permits, r.Origin, batch)
	case permit.Reset:
		b.begin(now, batch, settingOf(batch.Terms))
		return permit.Grant{OK: true}
	case permit.ResetQuota:
		b.beginCounted(now, batch)
		return permit.Grant{OK: true}
	}
	return r.Grant
}

// sound reports whether the account may be written: no NaN, no infinity, nothing that the reader would reject.
func (b *PermitBucket) sound() bool {
	return b.StoredPermits >= 0 && b.StoredPermits <= maxExact && b.ReturnedPermits >= 0 && b.ReturnedPermits <= maxExact &&
		b.CarryMicros >= -maxExact*shortfall && b.CarryMicros <= 1 &&
		b.NextFreeTicketMicros >= -maxExact && b.NextFreeTicketMicros <= maxExact && b.Seq <= maxSeq &&
		b.NextFreeTicketMicros-b.SeenMicros <= maxExact && b.SeenMicros-b.NextFreeTicketMicros <= maxExact &&
		b.HeldUntilMicros >= -maxExact && b.HeldUntilMicros <= maxExact && b.PausedMicros <= maxExact
}

// replaces reports whether the batch replaces a bucket of another kind. Then the configuration of the old bucket does not matter.
func replaces(batch *permit.Batch, kind kind) bool {
	return settingOf(batch.Terms).Kind != kind && len(batch.Requests) > 0 &&
		(batch.Requests[0].Op == permit.Reset || batch.Requests[0].Op == permit.ResetQuota)
}

// begin creates a new bucket.
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

// beginCounted creates a new bucket that keeps the debt and the stored permits of the old one, so that no call of a quota's window is forgotten. The
// rest of a penalty is no debt. A bucket of the other kind has counted nothing.
func (b *PermitBucket) beginCounted(now int64, batch *permit.Batch) {
	s, at, rest := settingOf(batch.Terms), b.balance(), int64(0)
	if b.PausedMicros > 0 {
		rest = max(0, b.HeldUntilMicros-now)
	}
	counted := b.setting.Kind == s.Kind
	if b.begin(now, batch, s); counted {
		b.set(permit.Balance{Stored: min(at.Stored, b.MaxPermits), Next: max(now, at.Next-rest), Carry: at.Carry})
	}
}

// observe returns the time of the decision. If the clock is up to two seconds behind the latest time seen, time stands still, so a clock
// that saw-tooths mints nothing. A clock further behind was set back: the debt keeps its size relative to it.
func (b *PermitBucket) observe(now, epoch int64, out *permit.Outcome) int64 {
	if behind := b.SeenMicros - now; behind > standstillMicros {
		b.NextFreeTicketMicros -= behind
		if b.PausedMicros > 0 {
			b.HeldUntilMicros -= behind
		}
		b.SeenMicros = now
		b.succeed(epoch) // places of the old time must not fit by chance
		out.Changed = true
	}
	b.SeenMicros = max(b.SeenMicros, now)
	return b.SeenMicros
}

// reconcile puts a configuration in force: the newest version, and of two with the same version the one with the larger content hash. As
// long as no limiter has set a version, each batch is decided under its own configuration.
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
		b.succeed(batch.Epoch)
		return nil
	case mine.Version == theirs.Version:
		out.Conflict = true
		if mine.contentHash() <= theirs.contentHash() {
			return nil
		}
		b.succeed(batch.Epoch)
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

// cost returns what n permits cost at a number of stored permits, in microseconds before rounding, and how many stored permits they use.
func (k *curve) cost(kind kind, stored, n float64) (micros, spend float64) {
	spend = min(n, stored)
	micros = float64((n - spend) * k.interval)
	if kind == warmingUp {
		micros += k.storedCost(stored, spend)
	}
	return micros, spend
}

// after returns the account after n permits are taken from it. The cost is rounded up to whole microseconds, and the amount of the rounding
// is carried to the next request. With exact time V = Next − Carry, V grows by the cost exactly, so the long-run rate is exact at every
// rate, and Next is never more than 1 µs ahead of V.
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

// ceil rounds a time up to whole microseconds. It ignores an excess over whole microseconds that is less than a shortfall and less than a
// nanosecond.
func (k *curve) ceil(micros float64) float64 {
	return math.Ceil(micros - min(float64(shortfall*k.interval), noiseMicros))
}

// holds reports whether a full bucket grants n permits at once. A bucket that warms up grants none so in every state.
func (s *setting) holds(n int64) bool { return s.Kind == bursty && float64(n) <= s.max }

// leastWait returns the shortest time after which n permits can fall due: from a full bucket without debt.
func (s *setting) leastWait(n int64) int64 {
	if s.Payment == PayLater {
		return 0
	}
	m, ok := s.after(s.Kind, permit.Balance{Stored: s.max}, n)
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

// due returns when the permits between two balances are due.
func (c *config) due(before, after permit.Balance) int64 {
	if c.Payment == PayLater {
		return before.Next
	}
	return after.Next
}

// take grants n permits if they are due within maxWait, and otherwise takes nothing. The bucket must be resynced. The grant's tag is its
// number plus the batch's nonce.
func (b *PermitBucket) take(now, n, maxWait, nonce int64) permit.Grant {
	before := b.balance()
	after, ok := b.setting.after(b.setting.Kind, before, n)
	if !ok {
		return permit.Grant{Overflow: true}
	}
	due := b.setting.due(before, after)
	if due-now > maxWait {
		return permit.Grant{WaitMicros: due - now}
	}
	return permit.Grant{OK: true, WaitMicros: due - now, Place: b.place(before, after, nonce)}
}

// quote returns what take would return for a refusal: how long n permits would take. It changes nothing.
func (b *PermitBucket) quote(now, n int64) permit.Grant {
	before := b.balance()
	after, ok := b.setting.after(b.setting.Kind, before, n)
	if !ok {
		return permit.Grant{Overflow: true}
	}
	return permit.Grant{WaitMicros: b.setting.due(before, after) - now}
}

// place moves the bucket from one balance to another, and returns the place between them.
func (b *PermitBucket) place(before, after permit.Balance, nonce int64) permit.Place {
	b.set(after)
	b.Seq++
	p := permit.Place{
		Epoch: b.Epoch, Tag: nonce + b.Seq, Prev: b.Tail, ID: b.Seq, Version: b.setting.Version, Returned: b.ReturnedPermits,
		Before: before, After: after,
	}
	b.Tail = p.Tag
	return p
}

// takeStored grants up to n stored permits, at least two. All are due at once.
func (b *PermitBucket) takeStored(now, n, nonce int64) permit.Grant {
	n = int64(min(float64(n), math.Floor(b.StoredPermits+shortfall)))
	if n < 2 {
		return permit.Grant{}
	}
	g := b.take(now, n, 0, nonce)
	if !g.OK && n > 2 { // the last one is short by more than the shortfall
		n--
		g = b.take(now, n, 0, nonce)
	}
	g.Permits = n
	return g
}

// takeNow decides one request as apply would, but much faster, if s is in force and the permits are due at once or the request is refused.
// Otherwise it returns decided = false. wait is that of a refusal. The place is filled unless it is nil; without it the permits cannot be
// given back.
func (b *PermitBucket) takeNow(now int64, s *setting, n, maxWait int64, place *permit.Place) (wait int64, granted, decided bool) {
	if b.Epoch == 0 || b.SeenMicros-now > standstillMicros || b.setting != s && b.setting.config != s.config {
		return 0, false, false
	}
	now = max(now, b.SeenMicros)
	at, overflow := earn(b.balance(), now, s.coolDown(b.IntervalMicros, b.MaxPermits), b.MaxPermits)
	after, ok := s.after(s.Kind, at, n)
	if !ok || b.Seq >= maxSeq {
		return 0, false, false
	}
	if due := s.due(at, after); due > now {
		return due - now, false, due-now > maxWait
	}
	if overflow {
		b.beginEpoch(engine.NewEpoch())
	}
	b.SeenMicros = now
	if place != nil {
		*place = b.place(at, after, permit.Nonce(engine.NewEpoch()))
		return 0, true, true
	}
	b.set(after)
	b.Seq++
	b.Tail = 0
	return 0, true, true
}

// renewed reports whether a new bucket of the batch's limiter would equal this one once it is full: the configuration in force is the
// limiter's own, and the rest can be forgotten.
func (b *PermitBucket) renewed(batch *permit.Batch) bool {
	return b.forgettable(batch.Initial, batch.Transient) && b.setting.sameContent(&settingOf(batch.Terms).config)
}

// forgettable reports whether the configuration is all that is lost with the state once the bucket is full, for limiters with these initial
// permits. The initial permits must fill the bucket. A version and the sum of penalties are lost, so only a transient bucket may have them.
// A penalty that has not ended is debt, so the bucket is not full yet.
func (b *PermitBucket) forgettable(initial float64, transient bool) bool {
	return (transient || b.Version == 0 && b.PausedMicros == 0) && (b.WarmupMicros > 0 || initial >= b.MaxPermits)
}

// ttlMillis returns how long a store keeps the state: the debt, plus the time to fill up, plus a day and an hour. If the state is renewed,
// a minute replaces the day and the hour. The minute is for limiters of other configurations on the same bucket, as during a rolling
// deployment: each loss would give them their initial permits. The state needs only least of that time, so a store need not prolong it with
// every write.
func (b *PermitBucket) ttlMillis(nowMicros int64, renewed bool) (ttl, least int64) {
	micros := max(0, float64(b.NextFreeTicketMicros-nowMicros)) + float64(b.MaxPermits*b.coolDown())
	full := int64(math.Ceil(min(micros, maxExact) / 1000))
	if renewed {
		return full + renewedKept + renewedSpare, full + renewedKept
	}
	return full + keptMillis + spareMillis, full + keptMillis
}

const (
	// maxReturned bounds the list of stored permits given back out of turn. Permits beyond it lapse.
	maxReturned = 32
	// maxSettled is how many batches with settlements the list has at most.
	maxSettled = 8
	// settlement is the least number in the list that stands for a settlement. No bucket counts so many grants.
	settlement = maxExact / 4
)

// giveBack returns places, or a part of them, and reports whether it returned any permits, and how many are missing. It never over-issues:
//
//   - If Tag is the tail, no permits were taken since. The account goes back to the balance before the places, and all later decisions
//     are as if the places had never been taken. Then the tail is another one, or the account is no later than the balance asked for,
//     so a repeated giveBack changes nothing. If the rate was changed meanwhile, only time that is still ahead goes back.
//   - Otherwise only stored permits of a bursty bucket are returned, and of them only as many as the bucket could have kept. Until its
//     debt ends it holds at most what was left after the grant, what has been given back since, and elapsed/interval: with all later
//     grants due when they are, and none of them used before. So with g more, where g ≤ max − that, it never overflows, and when its debt
//     ends it holds exactly g more. The next grant takes them, at no cost in time.
//
// Places with stored permits are listed, so that these are returned once, in either of the two ways. The list ends with the epoch, which is
// safe because places of older epochs lapse. A full list drops the oldest place, and places older than all that are listed lapse.
func (b *PermitBucket) giveBack(now int64, g *permit.Refund) (missing float64, ok bool) {
	if g.Epoch != b.Epoch {
		return 0, false
	}
	if g.Spent > 0 && (slices.Contains(b.returned, g.ID) || len(b.returned) == maxReturned && g.ID < slices.Min(b.returned)) {
		return 0, false
	}
	sameConfig, at := g.Version == b.setting.Version, b.balance()
	if g.Tag == b.Tail && g.Tag != 0 {
		to := g.To
		if !sameConfig {
			to.Stored, missing = at.Stored, g.Spent
			if at.Next != g.End {
				return 0, false
			}
		}
		if !to.Before(at) && !(to.Stored > at.Stored) {
			return 0, false
		}
		b.set(to)
		b.Tail = g.Tail
		b.list(g)
		b.resync(now)
		return missing, true
	}
	if b.setting.Kind != bursty || !sameConfig {
		return 0, false
	}
	room := b.MaxPermits - (g.Level + b.ReturnedPermits + float64(at.Next-g.End)/b.IntervalMicros)
	back := min(g.Spent, room)
	if !(back > 0) || g.Tag == 0 && back < g.Spent {
		return 0, false
	}
	if float64(g.End-now) > float64(back*b.IntervalMicros) {
		at.Stored += back
	} else {
		at = b.unsold(now, back)
	}
	at.Stored = min(b.MaxPermits, at.Stored)
	b.set(at)
	b.ReturnedPermits += back
	b.list(g)
	b.Tail = 0 // the balance before these places is no longer the stored one
	return float64(g.Permits) - back, true
}

// list records a place whose stored permits were returned, so that they are returned only once.
func (b *PermitBucket) list(g *permit.Refund) {
	if g.Spent > 0 {
		b.enlist(g.ID)
	}
	b.Seq++
}

// enlist adds a number to the list. A full list drops the oldest place.
func (b *PermitBucket) enlist(id int64) {
	list := append(slices.Clone(b.returned), id)
	if len(list) > maxReturned {
		oldest := slices.Index(list, slices.Min(list))
		list = slices.Delete(list, oldest, oldest+1)
	}
	b.returned = list
}

// enlistSettled adds the settlements of a batch to the list, unless they are in it. The oldest of maxSettled are dropped.
func (b *PermitBucket) enlistSettled(id int64) {
	settled := slices.DeleteFunc(slices.Clone(b.returned), func(id int64) bool { return id < settlement })
	if slices.Contains(settled, id) {
		return
	}
	if len(settled) == maxSettled {
		oldest := slices.Index(b.returned, settled[0])
		b.returned = slices.Delete(slices.Clone(b.returned), oldest, oldest+1)
	}
	b.enlist(id)
}

// hold pauses the bucket until now + d. All permits that are not due yet fall due that much later, in the same order and at the same
// distances, so the window bound holds for them as before. The stored permits of a bursty bucket are dropped, because the upstream that
// asked for the pause has not counted on them. A warm-up bucket gets colder, as in any idle time: the upstream has no calls meanwhile, whoever
// decides that, and one that has asked for a pause wants no full rate at its end. Of several holds the one that ends last counts. Places granted
// before cannot be given back any more.
func (b *PermitBucket) hold(now, d, epoch int64) bool {
	until := now + d
	longer := until - max(now, b.HeldUntilMicros)
	if b.PausedMicros == 0 {
		longer = d
	}
	if longer <= 0 || b.NextFreeTicketMicros+longer > maxExact {
		return false
	}
	b.StoredPermits = b.setting.held(&b.setting.config, b.StoredPermits, longer)
	b.NextFreeTicketMicros += longer
	b.HeldUntilMicros = until
	b.PausedMicros += longer
	b.succeed(epoch)
	b.Seq++
	return true
}

// settle charges n permits more than a grant has taken, or gives -n of them back.
//
// Nothing comes back to a bucket that has forgotten the grant: it was reset, or its store has lost it or has fallen back to an older state. Nor
// does it to one that has been full since: then it is as if the permits had never been taken. A message that arrives twice gives back once: the
// list of returned places has the latest maxSettled batches with settlements, and a batch that is executed later than its deadline does nothing.
//
// A charge is debt, which later requests wait for. What comes back shrinks the debt, but no further than to the end of a penalty. The rest is
// stored as far as there is room; a bucket that warms up stores nothing, since stored permits make it colder. So a bursty bucket that does
// not overflow is as if exactly the settled number of permits had been taken: its exact time plus the stored permits' moves by n intervals.
//
// Bound: let S be the time that settlements have given back so far, and F = V + S for a grant at the exact time V = Next − Carry. Grants
// follow each other in F without overlap, because V moves back exactly as S grows. A process may move a grant up once it knows that S has
// grown, by no more than that. So a permit that was granted at S1 and is released at S2 is released at F − S2 or later, and at F − S1 at the
// latest. Those of a window [w, w+T], the first of them granted at S1, the last released at S2, have F from w + S1 to w + T + S2: rate × T
// permits, and what was given back since the first of them was granted.
//
// The process that settles moves the time that it owns up by as much (schedule.Advance), so its permits still end where the debt does, and
// refunds of them restore what the bucket would be without them. The tail gets another tag, because refunds by a process that has not moved its
// permits would not. The permits count as returned, so the bound of later refunds of stored permits holds (see giveBack).
func (b *PermitBucket) settle(now, n int64, of permit.Origin, batch *permit.Batch) permit.Grant {
	if n > 0 {
		return b.take(now, n, maxExact, batch.Nonce())
	}
	if batch.Settled || !permit.Succeeds(b.Epoch, of.Epoch) || of.ID > b.Seq {
		return permit.Grant{}
	}
	b.enlistSettled(settlement + batch.Nonce())
	place := b.place(b.balance(), b.unsold(now, float64(-n)), batch.Nonce())
	b.ReturnedPermits += float64(-n)
	if b.StoredPermits > b.MaxPermits || b.ReturnedPermits > maxExact {
		b.StoredPermits = min(b.StoredPermits, b.MaxPermits)
		b.beginEpoch(batch.Epoch)
	}
	return permit.Grant{OK: true, Place: place}
}

// unsold returns the balance without the last n permits: the debt shrinks, but no further than to the end of a penalty. The rest is stored, by a
// bursty bucket.
func (b *PermitBucket) unsold(now int64, n float64) permit.Balance {
	floor := now
	if b.PausedMicros > 0 {
		floor = max(now, b.HeldUntilMicros)
	}
	interval, before := b.setting.interval, b.balance()
	back := float64(n * interval)
	debt := float64(before.Next-floor) - before.Carry
	after := permit.Balance{Stored: before.Stored, Next: floor}
	if whole := math.Floor(back + before.Carry); back <= debt && whole <= float64(before.Next-floor) {
		after.Next, after.Carry = before.Next-int64(whole), back+before.Carry-whole
	} else if b.setting.Kind == bursty {
		after.Stored += (back - debt) / interval
	}
	return after
}

// held returns the stored permits after a pause.
func (k *curve) held(c *config, stored float64, pause int64) float64 {
	if c.Kind == bursty {
		return 0
	}
	return min(k.max, stored+float64(pause)/c.coolDown(k.interval, k.max))
}

// setRate puts the next version in force, with the bucket's size in seconds unchanged.
func (b *PermitBucket) setRate(rate float64, mine int64) bool {
	c := b.setting.config
	c.Size = float64(c.Size*rate) / c.Rate
	c.Rate = rate
	if !c.succeed(mine) {
		return false
	}
	b.rescale(newSetting(c))
	return true
}

// setRateAndBurst puts the next version in force, with the given max permits. Stored permits stay as they are, as far as there is room. If
// they were scaled, a bucket made small, filled and made large again would mint permits.
func (b *PermitBucket) setRateAndBurst(rate, maxPermits float64, mine int64) bool {
	c := b.setting.config
	c.Rate = rate
	c.setMaxPermits(maxPermits)
	if c.Kind != bursty || !c.succeed(mine) {
		return false
	}
	b.adopt(newSetting(c))
	b.StoredPermits = min(b.StoredPermits, b.MaxPermits)
	b.Seq++
	return true
}

// succeed sets the version of c to the next one after its own and the given one. It reports whether there is one and c is valid.
func (c *config) succeed(mine int64) bool {
	newest := max(c.Version, mine)
	if newest == maxExact {
		return false
	}
	c.Version = newest + 1
	return c.validate() == nil
}
