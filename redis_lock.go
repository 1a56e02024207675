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

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// patience is for how long to wait for a lock between two attempts: first about as long as it is held by one who is alone,
// then about as long as it is kept, and at last half of that, so that those who have waited for longest ask most often.
type patience struct {
	tried int
	seen  *atomic.Bool // that somebody has it
}

// NextBackoff implements redislock.RetryStrategy.
func (p *patience) NextBackoff() time.Duration {
	p.tried++
	p.seen.Store(true)
	d := min(200*time.Microsecond<<min(p.tried, 4), 3*time.Millisecond)
	if p.tried >= 8 {
		d /= 2
	}
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

// decide implements decider.
func (s *RedisStore) decide(ctx context.Context, batch *batch) error {
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
				return fmt.Errorf("%w: key %q", ErrLockNotObtained, m.lock)
			}
			waited := false
			var err error
			asked := clock.Mono()
			token, waited, err = s.obtain(ctx, m.lock, &m.held)
			if waited {
				lockWait += clock.Mono() - asked
			}
			if err != nil {
				batch.out.lockWait = lockWait
				return err
			}
			m.held.Store(false)
			if m.batches = maxBatches; waited && batch.keep {
				m.batches = 0
			}
		}
		if m.batches++; m.batches == maxBatches {
			m.yield = clock.Mono() + yieldTime
		}
		done, err := s.underLock(ctx, batch, m, token)
		if err != nil || !done {
			m.text = ""
			s.release(m.lock, token)
		}
		batch.out.lockWait = lockWait
		if err != nil || done {
			return err
		}
		if !pause.Wait(ctx) {
			return fmt.Errorf("%w: key %q was lost again and again; is its time to live of %v too short?",
				ErrLockNotObtained, m.lock, s.lockTTL)
		}
		token = ""
	}
}

// yielded waits until the lock may be asked for again. It reports false if the context ends first.
func (m *cachedState) yielded(ctx context.Context) bool {
	left := m.yield - clock.Mono()
	return m.yield == 0 || left <= 0 || script.Sleep(ctx, left)
}

// kept implements storeCache: it tells that a lock is kept for the next batch.
func (m *cachedState) kept() bool { return m != nil && m.token != "" }

// release implements storeCache. The cached state knows whose lock it is: the limiter's own store, or one behind it.
func (m *cachedState) release() {
	if m.kept() {
		m.owner.release(m.lock, m.token)
		m.token = ""
	}
}

// waits implements storeCache.
func (m *cachedState) waits() bool { return m.held.Load() }

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

// holding is one batch of a process that holds its bucket's lock.
type holding struct {
	*RedisStore
	batch  *batch
	cached *cachedState
	token  string
	now    string // for the scripts to decide by, "" for the server's clock
	server clock.Remote
}

// underLock applies a batch and commits it, under the lock: what is remembered of the bucket if that turns out to be right,
// else what is read. It reports false if the fence stopped it: nothing happened, and the lock may be held.
func (s *RedisStore) underLock(ctx context.Context, batch *batch, m *cachedState, token string) (done bool, err error) {
	h := &holding{RedisStore: s, batch: batch, cached: m, token: token, now: s.clockArg(batch), server: batch.server()}
	var g prediction
	var reply []string
	asked := clock.Mono()
	if m.predict(batch, h.asOf(), &g) {
		reply, err = h.commit(ctx, strconv.FormatInt(g.asOf, 10), m.text, g.text, "")
	} else {
		reply, err = s.run(ctx, &readScript, 2, m.bucket, m.lock, token, h.now)
	}
	if err != nil {
		return false, err
	}
	switch reply[0] {
	case "lost":
		return false, nil
	case "late":
		return false, s.tooLate(batch)
	case "done":
		m.confirmed(&g, &batch.out)
		batch.out.ClockMicros, err = strconv.ParseInt(reply[1], 10, 64)
		return true, err
	}
	micros, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return false, err
	}
	h.server.Heard(micros, asked, clock.Mono())
	return h.decideOn(ctx, micros, reply[2])
}

// asOf is a time that the clock which decides has surely reached; 0: none is known.
func (h *holding) asOf() int64 {
	if !h.local {
		return asOf(&h.server)
	}
	at, _ := strconv.ParseInt(h.now, 10, 64)
	return at
}

// decideOn decides on what was read, and commits that.
func (h *holding) decideOn(ctx context.Context, micros int64, old string) (done bool, err error) {
	m, out := h.cached, &h.batch.out
	var b PermitBucket
	if err := b.parse(old, h.batch.own); err != nil {
		return false, corruptKey(m.bucket, err)
	}
	found := b
	if err = b.apply(micros, h.batch, out); err != nil {
		return false, err
	}
	text := ""
	if out.Changed {
		text = string(b.appendText(nil))
	}
	reply, err := h.commit(ctx, "", old, text, strconv.FormatInt(b.ttlMillis(out.NowMicros), 10))
	switch {
	case err != nil:
		return false, err
	case reply[0] == "late":
		return false, h.tooLate(h.batch)
	case reply[0] == "done":
		m.remember(old, &found, out, text)
	}
	return reply[0] == "done", nil
}

// commit writes a state in the place of an old one, and keeps the lock for the next batch if there may be one.
func (h *holding) commit(ctx context.Context, predictedAt, old, new, ttl string) ([]string, error) {
	m, keep := h.cached, ""
	if m.batches < maxBatches {
		keep = strconv.FormatInt(min(h.lockTTL, keptTTL).Milliseconds(), 10)
	}
	reply, err := h.run(ctx, &commitScript, 2, m.bucket, m.lock, h.token, h.now, predictedAt,
		h.deadlineArg(timeOf(ctx), &h.server), old, new, ttl, keep)
	if err == nil && reply[0] == "done" && new != "" && keep != "" {
		m.token, m.owner = h.token, h.RedisStore
	}
	return reply, err
}
