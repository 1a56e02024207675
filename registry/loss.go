package registry

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
)

// Loss describes the limits that a table has lost, after a load that finds more than half of them gone or off. It ends when a person confirms it
// (Registry.Confirm, [WithConfirmations]), or when at most half of the limits are missing.
type Loss struct {
	// Since is the time of the first load without the rows; zero if no limits are lost.
	Since time.Time
	// Before is the number of limits that were in force and confirmed: by their first load, or by a person. Gone is the number of these that are missing,
	// of which Off have a row that is off (Limit.Disabled). A limit that is missing for a day without a loss is no longer counted.
	Before, Gone, Off int
	// Names of the missing limits, in order, at most 20 of them.
	Names []string
	// Held reports whether the missing limits are still in force.
	Held bool
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

// WithConfirmedLosses keeps limits in force whose rows are gone or off together with more than half of the table, until the loss is confirmed.
// Without it three loads in a row suffice that agree. It excludes [WithAllowEmpty].
func WithConfirmedLosses() Option {
	return func(s *settings) error {
		return s.believe(rows.OnceConfirmed, "confirmed losses")
	}
}

// believe sets when a table with a loss is believed.
func (s *settings) believe(policy rows.Policy, field string) error {
	if s.lossPolicy != rows.AfterLoads && s.lossPolicy != policy {
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
	r.machine.mu.Lock()
	loss := r.machine.Confirm()
	r.machine.mu.Unlock()
	if loss.Since.IsZero() {
		return nil
	}
	r.log.Warn("registry: the loss of limits was confirmed", "gone", len(loss.Names), "of", loss.Before, "by", c.Who, "why", c.Why)
	if loss.Held {
		return r.Reload(ctx)
	}
	return nil
}

// watchLoss reads the fleet's confirmations during a loss. Only mind calls it.
func (r *Registry) watchLoss(ctx context.Context) {
	if r.confirmations == nil || r.loss().Since.IsZero() {
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
	r.machine.mu.Lock()
	counts := r.machine.Covers(time.Now(), last.ID, last.Age, 2*r.interval)
	r.machine.mu.Unlock()
	if counts {
		_ = r.confirmed(ctx, last) // a load that fails is logged
	}
}

// loss returns the present loss.
func (r *Registry) loss() Loss {
	r.machine.mu.Lock()
	l := r.machine.Loss()
	r.machine.mu.Unlock()
	return Loss{Since: l.Since, Before: l.Before, Gone: len(l.Names), Off: l.Off, Names: l.Names[:min(len(l.Names), mostLogged)], Held: l.Held}
}

// logLoss logs the effect of a load on a loss.
func (r *Registry) logLoss(event rows.Kind, l *rows.Loss) {
	about := []any{"gone", len(l.Names), "of", l.Before}
	switch {
	case event == rows.LossHeld && r.lossPolicy == rows.OnceConfirmed && l.Loads == 1:
		r.log.Warn("registry: more than half of the limits are gone from the table; they stay in force until the loss is confirmed", append(about, off(l.Off)...)...)
	case event == rows.LossHeld && r.lossPolicy == rows.AfterLoads:
		r.log.Warn("registry: more than half of the limits are gone from the table; they stay in force until further loads agree",
			append(append(about, "loads", l.LoadsLeft()), off(l.Off)...)...)
	case event == rows.LossBelieved:
		r.log.Warn("registry: more than half of the limits are gone", append(about, off(l.Off)...)...)
	case event == rows.LossRestored:
		r.log.Info("registry: the limits that were gone from the table are back")
	}
}

// off returns what the log says of limits whose rows are off.
func off(limits int) []any {
	if limits == 0 {
		return nil
	}
	return []any{"off", limits}
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
	about := []any{"gone", l.Gone, "of", l.Before, "buckets", first(l.Names), "for", time.Since(l.Since).Round(time.Second)}
	r.log.Warn(text, append(about, off(l.Off)...)...)
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
