package tokenbucket

import (
	"slices"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// maxReturned bounds the list of stored permits given back out of turn; a longer list means that they lapse.
const maxReturned = 32

// giveBack returns places, or a part of them, and reports whether anything came back. It never over-issues:
//
//   - Tag is the tail: nobody has taken since. The account goes back to where it was, and what follows is what would
//     have followed had the places never been taken. The tail is then another one, or the account no later than
//     where it is wanted, so sending the same giveBack twice changes nothing. If the rate was changed meanwhile, only
//     time that still lies ahead goes back.
//   - Else only stored permits of a bursty bucket that owes nothing come back, and of them only what the bucket
//     could have kept: since the grant it held at most level + ReturnedPermits + elapsed/interval, so with g more, where
//     g ≤ max − that, it would never have overflowed, and now it would hold exactly g more.
//
// Places with stored permits are listed, so that these come back once, in whichever of the two ways; that the list ends
// with the epoch is safe since places of older epochs lapse. When the list is full, it forgets the oldest, and places older
// than all that it has lapse.
func (b *PermitBucket) giveBack(now int64, g *permit.Refund) bool {
	if g.Epoch != b.Epoch {
		return false
	}
	if g.Spent > 0 && (slices.Contains(b.returned, g.ID) || len(b.returned) == maxReturned && g.ID < slices.Min(b.returned)) {
		return false
	}
	sameConfig, at := g.Version == b.setting.Version, b.balance()
	if g.Tag == b.Tail && g.Tag != 0 {
		to := g.To
		if !sameConfig {
			to.Stored = at.Stored
			if at.Next != g.End {
				return false
			}
		}
		if !to.Before(at) && !(to.Stored > at.Stored) {
			return false
		}
		b.set(to)
		b.Tail = g.Tail
		b.list(g)
		b.resync(now)
		return true
	}
	if b.setting.Kind != bursty || !sameConfig || at.Next > now {
		return false
	}
	room := b.MaxPermits - (g.Level + b.ReturnedPermits + float64(now-g.Granted)/b.IntervalMicros)
	back := min(g.Spent, room)
	if !(back > 0) {
		return false
	}
	b.StoredPermits = min(b.MaxPermits, b.StoredPermits+back)
	b.ReturnedPermits += back
	b.list(g)
	b.Tail = 0 // what the places before it left behind is no longer what is stored
	return true
}

// list notes places whose stored permits came back: once, in whatever way.
func (b *PermitBucket) list(g *permit.Refund) {
	if g.Spent > 0 {
		list := append(slices.Clone(b.returned), g.ID)
		if len(list) > maxReturned {
			oldest := slices.Index(list, slices.Min(list))
			list = slices.Delete(list, oldest, oldest+1)
		}
		b.returned = list
	}
	b.Seq++
}

// hold lets the bucket's time stand still until now + d: whatever was not due yet falls due that much later, in the order and
// at the distances that it had, so the window bound holds for it as before. The permits saved up are gone: the upstream, who
// says when it wants to hear from us again, has not counted on them. (A warm-up bucket gets colder, as in any pause.) Of
// several holds the one that ends last counts. Places granted before cannot be given back any more.
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
	b.beginEpoch(epoch)
	b.Seq++
	return true
}

// held is what a pause leaves of stored permits.
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

// setRateAndBurst puts the next version in force, with max permits as given. Stored permits stay as they are, as far as there
// is room: in proportion, a bucket made small, filled and made large again would mint permits.
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

// succeed makes c the next version after its own and the asking one's. It reports whether there is one and c is valid.
func (c *config) succeed(mine int64) bool {
	newest := max(c.Version, mine)
	if newest == maxExact {
		return false
	}
	c.Version = newest + 1
	return c.validate() == nil
}
