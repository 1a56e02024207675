package tokenbucket

import (
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
)

// Priority is the class of a limiter's callers: booking before search, users before batch jobs. All classes share one bucket and its whole
// rate, and nothing is set aside for any of them. The zero value is [Normal]. See [WithPriority].
type Priority uint8

const (
	// Normal is the highest priority, and the default. Processes of a version without priorities are Normal.
	Normal Priority = Priority(engine.Normal)
	// Low is for callers that give way to those of Normal.
	Low Priority = Priority(engine.Low)
	// Lowest is for callers that give way to those of Low, too.
	Lowest Priority = Priority(engine.Lowest)
)

var priorities = [...]string{Normal: "normal", Low: "low", Lowest: "lowest"}

// String returns normal, low or lowest.
func (p Priority) String() string {
	if int(p) < len(priorities) {
		return priorities[p]
	}
	return fmt.Sprintf("Priority(%d)", uint8(p))
}

// ParsePriority returns the priority of a name: normal, low or lowest, in letters of either case. An empty name is Normal. The error of any
// other name matches [ErrInvalidConfig].
func ParsePriority(name string) (Priority, error) {
	if name == "" {
		return Normal, nil
	}
	for p, known := range priorities {
		if strings.EqualFold(name, known) {
			return Priority(p), nil
		}
	}
	return Normal, fmt.Errorf("%w: priority %.40q: want normal, low or lowest", ErrInvalidConfig, name)
}

// MarshalText implements [encoding.TextMarshaler] by String. The error of a value that is none of the constants matches [ErrInvalidConfig].
func (p Priority) MarshalText() ([]byte, error) {
	if !p.valid() {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, wanted("priority", uint8(p), wantedPriority))
	}
	return []byte(p.String()), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler] by ParsePriority.
func (p *Priority) UnmarshalText(text []byte) (err error) {
	*p, err = ParsePriority(string(text))
	return err
}

func (p Priority) valid() bool { return p <= Lowest }

const wantedPriority = "Normal, Low or Lowest"

// WithPriority sets the priority of the limiter's callers. Default: [Normal].
//
// Callers of one priority are served first come, first served, in a queue of their own in each process. So a caller never waits behind
// those of a lower priority in its process. Between priorities the look-ahead decides (see [RateLimiter.Acquire]): that of Low is shorter by
// 0.7 horizons, that of Lowest by 0.9. The horizon is a second, or the time of four permits if that is longer. While callers of a higher
// priority want the whole rate, they get it, apart from a floor ([WithPriorityFloor]). What they leave goes to the next lower priority at
// once, so the whole rate is used.
//
// Permits that a process has taken are never revoked. So a caller of a higher priority waits for what lower ones own already: 0.3 horizons
// of Low, 0.1 of Lowest, and a permit more. Its timeout must be longer than that.
//
// A TryAcquire of a lower priority with a timeout of 0 is refused ([ByPriority]) while callers of a higher priority, for whom their process
// owns no permits yet, wait for the bucket in this process with the same store timeout. A TryReserve of a lower priority is refused beyond the
// look-ahead of its priority, since it cannot wait in the queue. [RateLimiter.Reserve] takes its permits whenever they are due, so it has no
// priority. [WithMaxWaiters] and [RateLimiter.Waiting] count the callers of one priority.
//
// Nothing of it is in the bucket's state, and the processes of a fleet need not agree. Callers of another priority in the same process learn
// of a [RateLimiter.Penalize], SetRate or Reset as other processes do, with their next reply.
//
// [WithPrefetch] is for Normal only.
func WithPriority(p Priority) Option {
	return func(o *options) {
		if !p.valid() {
			o.fail("priority", uint8(p), wantedPriority)
			return
		}
		o.priority = p
	}
}

const defaultFloor = 0.05

// WithPriorityFloor sets what callers of a lower priority get while those of a higher one want the whole rate: a process of the lower
// priority gets about this share of what a process of the higher one gets, and a permit in 1 / share horizons at least. 0 to 1, default
// 0.05. With 0 they get nothing then. It has no effect on a limiter of [Normal].
//
// If each process of a fleet has callers of both priorities, the lower one gets about that share of the rate, however many they are. Ten
// processes of a low priority beside one of a high one get up to a third, with the default. The floor does not lengthen a timeout: a call whose
// timeout is shorter than the debt of the bucket is refused. TryReserve on a [MemoryStore] has no floor.
func WithPriorityFloor(share float64) Option {
	return func(o *options) {
		if !(share >= 0 && share <= 1) {
			o.fail("priority floor", share, "0 to 1")
		}
		o.floor = share
	}
}

// Priority returns the priority of the limiter's callers.
func (l *RateLimiter) Priority() Priority {
	if l.following != nil {
		if now := l.inUse(); now != nil {
			return now.priority
		}
		return l.following.floor
	}
	return l.priority
}

// ForPriority returns the limiter of the same bucket, with the same options, for callers of another priority. It is for programs whose
// callers differ in priority call by call. A second call returns the same limiter. A priority above [Lowest] counts as Lowest.
//
// Only the limiter itself takes leases ([WithPrefetch]): those that ForPriority returns take none. That of a limiter of [Following] follows
// the same rule, and has the priority of the rule's limiter if that is lower.
func (l *RateLimiter) ForPriority(p Priority) *RateLimiter {
	if p = min(p, Lowest); p == l.priority {
		return l
	}
	k := l.kin.Load()
	if k == nil {
		k = &kin{}
		k[l.priority].Store(l)
		if !l.kin.CompareAndSwap(nil, k) {
			k = l.kin.Load()
		}
	}
	if other := k[p].Load(); other != nil {
		return other
	}
	if other := l.forPriority(p, k); k[p].CompareAndSwap(nil, other) {
		return other
	}
	return k[p].Load()
}

// kin are the limiters of one bucket and one set of options by priority, as ForPriority has made them. Any of them may be nil.
type kin [engine.Classes]atomic.Pointer[RateLimiter]

// newest returns the newest configuration in force that a limiter of any priority knows. Each priority has replies of its own.
func (l *RateLimiter) newest() *setting {
	known := l.effective()
	if k := l.kin.Load(); k != nil {
		for i := range k {
			if other := k[i].Load(); other != nil && other.effective().Version > known.Version {
				known = other.effective()
			}
		}
	}
	return known
}

// forPriority returns a limiter that differs from l in its priority only.
func (l *RateLimiter) forPriority(p Priority, k *kin) *RateLimiter {
	if f := l.following; f != nil {
		other := &RateLimiter{following: &following{f.name, f.rules, p}, priority: p}
		other.kin.Store(k)
		return other
	}
	other := &RateLimiter{
		own: l.own, maxWait: l.maxWait, enabled: l.enabled, plain: l.plain, policy: l.policy, quota: l.quota, member: l.member, parts: l.parts,
		shadow: l.shadow, observer: l.observer, label: l.label, memory: l.memory, time: l.time, priority: p, fairness: l.fairness, store: l.store,
		settles: l.settles,
	}
	other.kin.Store(k)
	from, e := &l.limiter, &other.limiter
	e.Coordinator = from.Coordinator.OfClass(engine.Class(p))
	e.Own, e.Initial, e.Transient, e.Quota, e.MaxWaiters, e.Floor = from.Own, from.Initial, from.Transient, from.Quota, from.MaxWaiters, from.Floor
	e.OnTrip, e.OnLost = from.OnTrip, from.OnLost
	logger := from.Logger.Load()
	e.Logger.Set(logger)
	if h := e.Coordinator.Health; h != nil && h != from.Coordinator.Health { // outages are counted for each coordinator
		h.Logger.Set(logger)
		h.Uses(l.policy.String())
		other.observeHealth()
	}
	return other
}
