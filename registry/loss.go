package registry

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Loss describes the limits that a table has lost, after a load that finds more than half of them gone. It ends when a person confirms it
// (Registry.Confirm, [WithConfirmations]), or when at most half of the limits are missing.
type Loss struct {
	// Since is the time of the first load without the rows; zero if no limits are lost.
	Since time.Time
	// Before is the number of limits that the table had, Gone the number of these that are missing.
	Before, Gone int
	// Names of the missing limits, in order, at most 20 of them.
	Names []string
	// Held reports whether the missing limits are still in force.
	Held bool

	loads int // consecutive loads that found the limits gone
}

// Confirmation is a person's statement that a loss of limits was intended, see [WithConfirmations].
type Confirmation struct {
	// ID differs for each confirmation; it is empty if there was none.
	ID string `json:"id"`
	// Who confirmed the table, and Why.
	Who string `json:"who"`
	Why string `json:"why"`
	// Age is the time since the confirmation, by the clock of its store.
	Age time.Duration `json:"-"`
}

// Confirmations keeps the last Confirmation of a fleet. [NewRedisConfirmations] is one.
type Confirmations interface {
	// Last returns the last confirmation; the zero Confirmation if there is none.
	Last(ctx context.Context) (Confirmation, error)
	// Confirm stores a new confirmation in place of the last one.
	Confirm(ctx context.Context, who, why string) error
}

// WithConfirmations sets the store of the fleet's confirmations of lost limits. During a loss the Registry reads it every second. A
// confirmation counts once, for a loss that was found before it or at most two intervals after it, since processes load at different times.
// Without this option a loss ends only by Confirm of this Registry, or by rows that return.
func WithConfirmations(c Confirmations) Option {
	return func(s *settings) error {
		if c == nil {
			return bad("confirmations", "nil", "a store of confirmations")
		}
		s.confirmations = c
		return nil
	}
}

// WithConfirmedLosses keeps limits in force whose rows are gone together with more than half of the table, until the loss is confirmed.
// Without it three loads in a row suffice that agree. It excludes [WithAllowEmpty].
func WithConfirmedLosses() Option {
	return func(s *settings) error {
		return s.believe(onceConfirmed, "confirmed losses")
	}
}

// believe sets when a table with a loss is believed.
func (s *settings) believe(policy lossPolicy, field string) error {
	if s.lossPolicy != afterLoads && s.lossPolicy != policy {
		return bad(field, "together with the opposite", "either WithAllowEmpty or WithConfirmedLosses")
	}
	s.lossPolicy = policy
	return nil
}

// Confirm accepts a loss of limits: the lost limits are no longer in force after the next load, which begins at once. With
// [WithConfirmations] it does so for the fleet. who and why are for the log. If this Registry has no loss, nothing changes in it.
func (r *Registry) Confirm(ctx context.Context, who, why string) error {
	if r.confirmations != nil {
		if err := r.confirmations.Confirm(ctx, who, why); err != nil {
			return fmt.Errorf("registry: confirm: %w", err)
		}
	}
	return r.confirmed(ctx, Confirmation{Who: who, Why: why})
}

// confirmed ends the loss after a confirmation.
func (r *Registry) confirmed(ctx context.Context, c Confirmation) error {
	loss := r.lost.confirm()
	if loss.Since.IsZero() {
		return nil
	}
	r.log.Warn("registry: the loss of limits was confirmed", "gone", loss.Gone, "of", loss.Before, "by", c.Who, "why", c.Why)
	if loss.Held {
		return r.Reload(ctx)
	}
	return nil
}

// watchLoss reads the fleet's confirmations during a loss. Only mind calls it.
func (r *Registry) watchLoss(ctx context.Context) {
	if r.confirmations == nil || r.lost.now().Since.IsZero() {
		return
	}
	reading, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	last, err := r.confirmations.Last(reading)
	if err != nil {
		if now := time.Now(); now.Sub(r.lossUnread) >= again {
			r.lossUnread = now
			r.log.Warn("registry: confirmations of lost limits cannot be read", "error", err)
		}
		return
	}
	if r.lost.confirmedBy(&last, time.Now(), 2*r.interval) {
		_ = r.confirmed(ctx, last) // a load that fails is logged
	}
}

// logLoss logs the effect of a load on a loss.
func (r *Registry) logLoss(event lossEvent) {
	l := r.lost.now()
	switch {
	case event == lossHeld && r.lossPolicy == onceConfirmed && l.loads == 1:
		r.log.Warn("registry: more than half of the limits are gone from the table; they stay in force until the loss is confirmed", "gone", l.Gone, "of", l.Before)
	case event == lossHeld && r.lossPolicy == afterLoads:
		r.log.Warn("registry: more than half of the limits are gone from the table; they stay in force until further loads agree",
			"gone", l.Gone, "of", l.Before, "loads", agreeing-l.loads)
	case event == lossBelieved:
		r.log.Warn("registry: more than half of the limits are gone", "gone", l.Gone, "of", l.Before)
	case event == lossRestored:
		r.log.Info("registry: the limits that were gone from the table are back")
	}
}

// remindLoss logs a loss again.
func (r *Registry) remindLoss(l *Loss) {
	text := "registry: more than half of the limits are gone, and no longer in force; confirm the loss, or restore the rows"
	switch {
	case l.Since.IsZero():
		return
	case l.Held:
		text = "registry: more than half of the limits are gone from the table, and still in force; confirm the loss, or restore the rows"
	}
	r.log.Warn(text, "gone", l.Gone, "of", l.Before, "buckets", first(l.Names), "for", time.Since(l.Since).Round(time.Second))
}

// lossPolicy decides when a table is accepted that has lost more than half of its limits.
type lossPolicy uint8

const (
	afterLoads    lossPolicy = iota // after enough consecutive loads, see agreeing
	atOnce                          // WithAllowEmpty
	onceConfirmed                   // WithConfirmedLosses
)

// agreeing is the number of consecutive loads that must find more than half of the limits gone.
const agreeing = 3

// losses decides whether a table that has lost more than half of its limits is accepted. It keeps the names of the lost limits until the
// loss is confirmed or the rows return. The zero value has no table yet. All methods are safe for concurrent use.
type losses struct {
	policy lossPolicy

	mu      sync.Mutex
	trusted int                 // number of names in the last table that was accepted
	loads   int                 // consecutive loads that found more than half of them gone
	accept  bool                // whether the next table is accepted, because a person has confirmed it
	since   time.Time           // when the loss was found
	before  int                 // number of names in the table before the loss
	had     map[string]struct{} // names in that table
	missing map[string]struct{} // names that are gone since then; nil if there is no loss
	held    bool                // whether they are still in force
	last    string              // ID of the last confirmation that counted
}

// lossEvent is the effect of a load on a loss.
type lossEvent uint8

const (
	noLoss       lossEvent = iota // no effect
	lossHeld                      // more than half is gone, and stays in force for now
	lossBelieved                  // more than half is gone, and no longer in force
	lossRestored                  // the rows are back
)

// load decides about a table with that number of names. inForce are the names in force, gone those of them that the table lacks; has reports
// whether it has a name.
func (l *losses) load(now time.Time, inForce iter.Seq[string], gone []string, names int, has func(name string) bool) lossEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	doubt := len(gone)*2 > l.trusted && l.policy != atOnce
	if doubt {
		l.lose(now, inForce, gone)
	}
	for name := range l.missing {
		if has(name) {
			delete(l.missing, name)
		}
	}
	restored := l.missing != nil && l.absent()*2 <= l.before // also if other names are gone that came instead, by a rename
	if doubt && !restored && !l.accept && (l.policy == onceConfirmed || l.loads < agreeing) {
		l.held = true
		return lossHeld
	}
	if restored || l.accept {
		l.missing = nil
	}
	l.trusted, l.loads, l.held, l.accept = names, 0, false, false
	switch {
	case restored:
		return lossRestored
	case doubt:
		return lossBelieved
	}
	return noLoss
}

// absent returns the number of missing names that the table had before the loss. l.mu must be held.
func (l *losses) absent() (n int) {
	for name := range l.missing {
		if _, had := l.had[name]; had {
			n++
		}
	}
	return n
}

// lose adds names to the loss, and begins a loss if there is none. l.mu must be held.
func (l *losses) lose(now time.Time, inForce iter.Seq[string], gone []string) {
	l.loads++
	if l.missing == nil {
		l.since, l.before, l.missing, l.had = now, l.trusted, map[string]struct{}{}, map[string]struct{}{}
		for name := range inForce {
			l.had[name] = struct{}{}
		}
	}
	for _, name := range gone {
		l.missing[name] = struct{}{}
	}
}

// confirm ends the loss, and returns it. If the lost limits are still in force, the loss ends with the next load.
func (l *losses) confirm() Loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.loss()
	if l.accept = l.held; !l.held {
		l.missing = nil
	}
	return was
}

// confirmedBy reports whether a confirmation is for this loss: it has not counted yet, and is at most grace older than the loss.
func (l *losses) confirmedBy(c *Confirmation, now time.Time, grace time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.missing == nil || c.ID == "" || c.ID == l.last || c.Age > now.Sub(l.since)+grace {
		return false
	}
	l.last = c.ID
	return true
}

// now returns the present loss.
func (l *losses) now() Loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.loss()
}

// loss returns the present loss. l.mu must be held.
func (l *losses) loss() Loss {
	if l.missing == nil {
		return Loss{}
	}
	names := slices.Sorted(maps.Keys(l.missing))
	return Loss{Since: l.since, Before: l.before, Gone: len(names), Names: names[:min(len(names), mostLogged)], Held: l.held, loads: l.loads}
}

// RedisClient is the method of a client that RedisConfirmations needs. All clients of go-redis have it.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// RedisConfirmations keeps the confirmation of a fleet under a key in Redis, for a day.
type RedisConfirmations struct {
	client RedisClient
	key    string
}

const confirmationLives = 24 * time.Hour

// NewRedisConfirmations returns a store of confirmations under a key in Redis.
func NewRedisConfirmations(client RedisClient, key string) (*RedisConfirmations, error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, bad("redis client", "nil", "a client")
	}
	if len(key) < 1 || len(key) > 512 {
		return nil, bad("confirmations key", fmt.Sprintf("%.40q of %d bytes", key, len(key)), "1 to 512 bytes")
	}
	return &RedisConfirmations{client, key}, nil
}

// Last implements Confirmations.
func (r *RedisConfirmations) Last(ctx context.Context) (c Confirmation, err error) {
	get, lives := redis.NewStringCmd(ctx, "get", r.key), redis.NewDurationCmd(ctx, time.Millisecond, "pttl", r.key)
	_ = r.client.Process(ctx, get) // its error is the command's
	text, err := get.Result()
	if errors.Is(err, redis.Nil) {
		return c, nil
	}
	if err == nil {
		_ = r.client.Process(ctx, lives)
		err = lives.Err()
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &c)
	}
	if err != nil {
		return Confirmation{}, fmt.Errorf("key %q: %w", r.key, err)
	}
	c.Age = confirmationLives - lives.Val()
	return c, nil
}

// Confirm implements Confirmations.
func (r *RedisConfirmations) Confirm(ctx context.Context, who, why string) error {
	text, err := json.Marshal(Confirmation{ID: rand.Text(), Who: who, Why: why})
	if err != nil {
		return err
	}
	set := redis.NewStatusCmd(ctx, "set", r.key, text, "px", confirmationLives.Milliseconds())
	_ = r.client.Process(ctx, set)
	if err := set.Err(); err != nil {
		return fmt.Errorf("key %q: %w", r.key, err)
	}
	return nil
}
