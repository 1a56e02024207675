package registry

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Loss is what a table has lost when a load finds more than half of its limits gone. It lasts until a person confirms it
// (Registry.Confirm, [WithConfirmations]), or until no more than half of them are missing any longer.
type Loss struct {
	// Since is when a load found the rows gone first; zero: nothing is lost.
	Since time.Time
	// Before is how many limits the table had, Gone how many of these are missing.
	Before, Gone int
	// Names of the missing limits, in order, at most 20 of them.
	Names []string
	// Held reports whether the missing limits are still in force.
	Held bool

	loads int // in a row that found them gone
}

// Confirmation is a person's word that a table is meant as it is, see [WithConfirmations].
type Confirmation struct {
	// ID is another one for each confirmation; empty: there was none.
	ID string `json:"id"`
	// Who confirmed the table, and Why.
	Who string `json:"who"`
	Why string `json:"why"`
	// Age is how long ago, by the clock of the place that keeps it.
	Age time.Duration `json:"-"`
}

// Confirmations is where a fleet keeps its last Confirmation: [NewRedisConfirmations], for instance.
type Confirmations interface {
	// Last returns the last one; the zero Confirmation if there is none.
	Last(ctx context.Context) (Confirmation, error)
	// Confirm replaces it by a new one.
	Confirm(ctx context.Context, who, why string) error
}

// WithConfirmations sets where the fleet keeps confirmations of tables that have lost more than half of their limits. While there is
// such a loss, the Registry reads them every second. A confirmation counts once, for a loss that was found before it, or at most two
// intervals after it: not all processes load at the same time. Without this option only Confirm of this Registry ends a loss, or the
// rows do that come back.
func WithConfirmations(c Confirmations) Option {
	return func(s *settings) error {
		if c == nil {
			return bad("confirmations", "nil", "a place for them")
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

// Confirm accepts the table as it is: limits whose rows are gone with more than half of the table are no longer in force after the next
// load, which begins at once, and the loss is over. With [WithConfirmations] it does so for the fleet. who and why are for the log.
// Without a loss it does nothing here.
func (r *Registry) Confirm(ctx context.Context, who, why string) error {
	if r.confirmations != nil {
		if err := r.confirmations.Confirm(ctx, who, why); err != nil {
			return fmt.Errorf("registry: confirm: %w", err)
		}
	}
	return r.confirmed(ctx, Confirmation{Who: who, Why: why})
}

// confirmed ends the loss by a confirmation.
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

// watchLoss reads the fleet's confirmations while there is a loss. Only mind calls it.
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

// tellLoss logs what a load means for a loss.
func (r *Registry) tellLoss(event lossEvent) {
	l := r.lost.now()
	switch {
	case event == lossHeld && r.lossPolicy == onceConfirmed && l.loads == 1:
		r.log.Warn("registry: more than half of the limits are gone from the table; they stay in force until that is confirmed", "gone", l.Gone, "of", l.Before)
	case event == lossHeld && r.lossPolicy == afterLoads:
		r.log.Warn("registry: more than half of the limits are gone from the table; they stay in force until further loads agree",
			"gone", l.Gone, "of", l.Before, "loads", agreeing-l.loads)
	case event == lossBelieved:
		r.log.Warn("registry: more than half of the limits are gone", "gone", l.Gone, "of", l.Before)
	case event == lossRestored:
		r.log.Info("registry: the limits that were gone from the table are back")
	}
}

// remindLoss logs a loss that lasts.
func (r *Registry) remindLoss(l *Loss) {
	text := "registry: more than half of the limits are gone, and not in force any more; confirm it, or restore the rows"
	switch {
	case l.Since.IsZero():
		return
	case l.Held:
		text = "registry: more than half of the limits are gone from the table, and still in force; confirm it, or restore the rows"
	}
	r.log.Warn(text, "gone", l.Gone, "of", l.Before, "buckets", first(l.Names), "for", time.Since(l.Since).Round(time.Second))
}

// lossPolicy is when a table is believed that has lost more than half of its limits.
type lossPolicy uint8

const (
	afterLoads    lossPolicy = iota // when enough loads in a row agree: see agreeing
	atOnce                          // WithAllowEmpty
	onceConfirmed                   // WithConfirmedLosses
)

// agreeing is how many loads in a row must find more than half of the limits gone.
const agreeing = 3

// losses decides whether a table is believed that has lost more than half of its limits, and keeps what was lost until that is
// confirmed or restored. The zero value has no table yet. Its methods may be called by many goroutines at once.
type losses struct {
	policy lossPolicy

	mu      sync.Mutex
	trusted int                 // names of the last table that was believed
	loads   int                 // in a row that found more than half of them gone
	accept  bool                // the next table is believed, since a person has confirmed it
	since   time.Time           // when the loss was found
	before  int                 // names of the table before the loss
	missing map[string]struct{} // names that are gone since then; nil: nothing is lost
	held    bool                // they are still in force
	last    string              // the ID of the last confirmation that counted
}

// lossEvent is what a table means for a loss.
type lossEvent uint8

const (
	noLoss       lossEvent = iota // nothing new
	lossHeld                      // more than half is gone, and stays in force for now
	lossBelieved                  // more than half is gone, and no longer in force
	lossRestored                  // the rows are back
)

// load takes in a table with so many names: gone are those in force that are not in it, and has reports which are.
func (l *losses) load(now time.Time, gone []string, names int, has func(name string) bool) lossEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	doubt := len(gone)*2 > l.trusted && l.policy != atOnce
	if doubt {
		l.lose(now, gone)
	}
	for name := range l.missing {
		if has(name) {
			delete(l.missing, name)
		}
	}
	if doubt && !l.accept && (l.policy == onceConfirmed || l.loads < agreeing) {
		l.held = true
		return lossHeld
	}
	restored := l.missing != nil && len(l.missing)*2 <= l.before
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

// lose adds names to the loss, which begins now if there is none. l.mu must be held.
func (l *losses) lose(now time.Time, gone []string) {
	l.loads++
	if l.missing == nil {
		l.since, l.before, l.missing = now, l.trusted, map[string]struct{}{}
	}
	for _, name := range gone {
		l.missing[name] = struct{}{}
	}
}

// confirm ends the loss, and returns it. If the limits are still in force, it ends with the next load.
func (l *losses) confirm() Loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.loss()
	if l.accept = l.held; !l.held {
		l.missing = nil
	}
	return was
}

// confirmedBy reports whether a confirmation is of this loss: it has not counted yet, and is older than the loss by grace at most.
func (l *losses) confirmedBy(c *Confirmation, now time.Time, grace time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.missing == nil || c.ID == "" || c.ID == l.last || c.Age > now.Sub(l.since)+grace {
		return false
	}
	l.last = c.ID
	return true
}

// now returns what is lost.
func (l *losses) now() Loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.loss()
}

// loss returns what is lost. l.mu must be held.
func (l *losses) loss() Loss {
	if l.missing == nil {
		return Loss{}
	}
	names := slices.Sorted(maps.Keys(l.missing))
	return Loss{Since: l.since, Before: l.before, Gone: len(names), Names: names[:min(len(names), mostTold)], Held: l.held, loads: l.loads}
}

// RedisConfirmations is a key in Redis, for a whole fleet. It lives for a day.
type RedisConfirmations struct {
	client SwitchClient
	key    string
}

const confirmationLives = 24 * time.Hour

// NewRedisConfirmations returns confirmations that are kept under a key in Redis.
func NewRedisConfirmations(client SwitchClient, key string) (*RedisConfirmations, error) {
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
