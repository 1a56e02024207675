package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// patience is for how long to wait for a lock between two attempts: first about as long as it is held by one who is alone,
// then about as long as it is kept, and at last less and less, so that those who have waited for longest ask most often.
type patience struct {
	tried int
	seen  *atomic.Bool // that somebody has it
}

// NextBackoff implements redislock.RetryStrategy.
func (p *patience) NextBackoff() time.Duration {
	p.tried++
	p.seen.Store(true)
	d := min(200*time.Microsecond<<min(p.tried, 4), 3*time.Millisecond) >> min(2, p.tried/8)
	return d/2 + rand.N(d)
}

const (
	// maxBatches is how many batches a process decides in a row under a lock that others wait for, if it has so many.
	// Handing it over takes as long as several batches do.
	maxBatches = 16
	// keptTTL is how long a lock that is kept outlives a process that ends in between.
	keptTTL = 20 * time.Millisecond
	// yieldTime is for how long it then leaves the lock to those who wait, since it would always be faster than they are.
	yieldTime = 500 * time.Microsecond
)

// Apply implements [Store].
func (s *RedisStore) Apply(ctx context.Context, batch *Batch) (Outcome, error) {
	m := s.cacheOf(batch)
	if m.owner != s { // another store of Redis was asked before
		m.release()
	}
	token := m.token
	m.token = ""
	lockWait := time.Duration(0)
	for pause := script.NewPause(); ; {
		if token == "" {
			if !m.yielded(ctx) {
				return Outcome{}, fmt.Errorf("%w: key %q", ErrLockNotObtained, m.lock)
			}
			waited := false
			var err error
			asked := mono()
			token, waited, err = s.obtain(ctx, m.lock, &m.held)
			if waited {
				lockWait += mono() - asked
			}
			if err != nil {
				return Outcome{lockWait: lockWait}, err
			}
			m.held.Store(false)
			if m.batches = maxBatches; waited && batch.keep {
				m.batches = 0
			}
		}
		if m.batches++; m.batches == maxBatches {
			m.yield = mono() + yieldTime
		}
		out, done, err := s.decide(ctx, batch, m, token)
		if err != nil || !done {
			m.text = ""
			s.release(m.lock, token)
		}
		out.lockWait = lockWait
		if err != nil || done {
			return out, err
		}
		if !pause.Wait(ctx) {
			return out, fmt.Errorf("%w: key %q was lost again and again; is its time to live of %v too short?",
				ErrLockNotObtained, m.lock, s.lockTTL)
		}
		token = ""
	}
}

// yielded waits until the lock may be asked for again. It reports false if the context ends first.
func (m *cachedState) yielded(ctx context.Context) bool {
	left := m.yield - mono()
	return m.yield == 0 || left <= 0 || script.Sleep(ctx, left)
}

// kept tells that a lock is kept for the next batch.
func (m *cachedState) kept() bool { return m != nil && m.token != "" }

// release releases a lock that was kept for a next batch which did not come. The cached state knows whose lock it is, so the engine need
// not know which store keeps it: the limiter's own, or one behind it.
func (m *cachedState) release() {
	if m.kept() {
		m.owner.release(m.lock, m.token)
		m.token = ""
	}
}

// obtain takes the lock, or gives up when the context ends. It tells whether somebody else had it.
func (s *RedisStore) obtain(ctx context.Context, lock string, held *atomic.Bool) (token string, waited bool, err error) {
	var refused error
	pause := script.NewPause()
	for {
		patience := &patience{seen: held}
		token = strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
		attempt, cancel := context.WithTimeout(ctx, s.lockTTL)
		_, err = s.locker.Obtain(attempt, lock, s.lockTTL, &redislock.Options{Token: token, RetryStrategy: patience})
		ended := attempt.Err() != nil
		cancel()
		switch {
		case err == nil:
			return token, waited || patience.tried > 0, nil
		case !ended && script.NotExecuted(err):
			refused = err
			if !pause.Wait(ctx) {
				return "", false, err
			}
			continue
		case !ended || !errors.Is(err, context.DeadlineExceeded):
			s.release(lock, token) // the answer may be lost, but not the lock taken
			if err != nil && strings.Contains(err.Error(), "WRONGTYPE") {
				err = wrongType(lock)
			}
			return "", false, err
		}
		waited = true
		s.release(lock, token)
		switch {
		case ctx.Err() != nil && held.Load():
			return "", true, fmt.Errorf("%w: key %q", ErrLockNotObtained, lock)
		case ctx.Err() != nil && refused != nil:
			return "", false, refused
		case ctx.Err() != nil:
			return "", false, fmt.Errorf("%w: key %q", ErrStoreTimeout, lock)
		}
		// Whoever held it for longer than its time to live has died while the clock was set back, or set no expiry.
		if _, err := s.run(ctx, &clipScript, 1, lock, strconv.FormatInt(s.lockTTL.Milliseconds(), 10)); err != nil {
			return "", false, err
		}
	}
}

// release removes a lock that may be ours, with a context of its own. Nobody waits for it.
func (s *RedisStore) release(lock, token string) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), s.lockTTL)
		defer cancel()
		// The bucket's key is only named to be in the same slot; without a new state nothing is read or written.
		_, _ = s.run(ctx, &commitScript, 2, strings.TrimSuffix(lock, ":lock"), lock, token, "", "", "", "", "", "", "")
	}()
}

// decide applies a batch and commits it, under the lock: what is remembered of the bucket if that batches out to be right,
// else what is read. It reports false if the fence stopped it: nothing happened, and the lock may be held.
func (s *RedisStore) decide(ctx context.Context, batch *Batch, m *cachedState, token string) (out Outcome, done bool, err error) {
	now, server := s.clockArg(batch), batch.server()
	keep := ""
	if m.batches < maxBatches {
		keep = strconv.FormatInt(min(s.lockTTL, keptTTL).Milliseconds(), 10)
	}
	commit := func(predicted, old, new, ttl string) ([]string, error) {
		reply, err := s.run(ctx, &commitScript, 2, m.bucket, m.lock, token, now, predicted,
			s.deadlineArg(timeOf(ctx), &server), old, new, ttl, keep)
		if err == nil && reply[0] == "done" && new != "" && keep != "" {
			m.token, m.owner = token, s
		}
		return reply, err
	}
	predictedAt := asOf(&server)
	if s.local {
		predictedAt, _ = strconv.ParseInt(now, 10, 64)
	}
	var g prediction
	var reply []string
	asked := mono()
	if m.predict(batch, predictedAt, &g) {
		reply, err = commit(strconv.FormatInt(g.asOf, 10), m.text, g.text, "")
	} else {
		reply, err = s.run(ctx, &readScript, 2, m.bucket, m.lock, token, now)
	}
	if err != nil {
		return out, false, err
	}
	switch reply[0] {
	case "lost":
		return out, false, nil
	case "late":
		return out, false, s.tooLate(batch)
	case "done":
		out = m.confirmed(&g)
		out.ClockMicros, err = strconv.ParseInt(reply[1], 10, 64)
		return out, true, err
	}
	micros, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return out, false, err
	}
	server.Heard(micros, asked, mono())
	var b PermitBucket
	old := reply[2]
	if err := b.parse(old, batch.own); err != nil {
		return out, false, corrupt(m.bucket, err)
	}
	found := b
	if out, err = b.Apply(micros, batch); err != nil {
		return out, false, err
	}
	text := ""
	if out.Changed {
		new, _ := b.MarshalText()
		text = string(new)
	}
	reply, err = commit("", old, text, strconv.FormatInt(b.TTLMillis(out.NowMicros), 10))
	switch {
	case err != nil:
		return out, false, err
	case reply[0] == "late":
		return out, false, s.tooLate(batch)
	case reply[0] == "done":
		m.remember(old, &found, &out, text)
	}
	return out, reply[0] == "done", nil
}
