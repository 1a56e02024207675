package redisbucket

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
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// patience computes the pauses between two attempts to take a lock. They begin at about the time that a single batch holds a lock, and grow to
// about the time that a process keeps one. From the eighth attempt on they are half as long, so the longest waiters try most often.
type patience struct {
	tried int
	seen  *atomic.Bool // set once an attempt has failed: another process holds the lock
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
	// maxBatches bounds the batches that a process decides in a row under a lock that others wait for. Handing the lock over takes as long
	// as several batches do.
	maxBatches = 16
	// keptTTL is the time to live of a kept lock: how long it outlives a process that ends between two batches.
	keptTTL = 20 * time.Millisecond
	// yieldTime is how long a process then leaves the lock to the waiting ones. Without it, it would always be faster than they are.
	yieldTime = 500 * time.Microsecond
)

// LockStore decides in this process, under a distributed lock: obtain, read, then commit and release in one script. The commit is fenced.
type LockStore struct{ Store }

// NewLockStore returns a store on a client. If the error is not nil, the client cannot work, and only Keys may be called.
func NewLockStore(client Client, o Options) (*LockStore, error) {
	s := new(LockStore)
	return s, s.init(client, o)
}

// Decide decides a batch and stores the outcome in it. It waits for the lock until the context ends. While the bucket's slot moves, it decides by
// the script of ScriptStore instead, since the bucket and a lock may be on two servers.
func (s *LockStore) Decide(ctx context.Context, batch *permit.Batch) error {
	m := s.sessionOf(batch)
	if m.owner != s { // the lock was kept by another store
		m.Release()
	}
	if m.moves() {
		m.Release()
		return s.apply(ctx, batch, m)
	}
	token := m.token
	m.token = ""
	lockWait := time.Duration(0)
	for pause := script.NewPause(); ; {
		if token == "" {
			if !m.yielded(ctx) {
				return fmt.Errorf("%w: key %q", permit.ErrLockNotObtained, m.lock)
			}
			waited := false
			var err error
			asked := clock.Mono()
			token, waited, err = s.obtain(ctx, m.lock, &m.held)
			if waited {
				lockWait += clock.Mono() - asked
			}
			if err != nil {
				batch.Outcome.LockWait = lockWait
				return err
			}
			m.held.Store(false)
			if m.batches = maxBatches; waited && batch.Keep {
				m.batches = 0
			}
		}
		if m.batches++; m.batches == maxBatches {
			m.yield = clock.Mono() + yieldTime
		}
		done, err := s.underLock(ctx, batch, m, token)
		if m.apart(err) {
			m.text = ""
			s.releaseNow(ctx, m.lock, token) // or the script would wait for it
			return s.apply(ctx, batch, m)
		}
		if err != nil || !done {
			m.text = ""
			s.release(m.lock, token)
		}
		batch.Outcome.LockWait = lockWait
		if err != nil || done {
			return err
		}
		if !pause.Wait(ctx) {
			return fmt.Errorf("%w: key %q was lost again and again; is its time to live of %v too short?",
				permit.ErrLockNotObtained, m.lock, s.lockTTL)
		}
		token = ""
	}
}

// yielded waits until the lock may be asked for again. It reports false if the context ends first.
func (m *Session) yielded(ctx context.Context) bool {
	left := m.yield - clock.Mono()
	return m.yield == 0 || left <= 0 || script.Sleep(ctx, left)
}

// Kept implements permit.Session: it reports whether a lock is kept for the next batch.
func (m *Session) Kept() bool { return m != nil && m.token != "" }

// Release implements permit.Session. It releases a kept lock by the store that took it, which may be one behind the limiter's own.
func (m *Session) Release() {
	if m.Kept() {
		m.owner.release(m.lock, m.token)
		m.token = ""
	}
}

// Waits implements permit.Session: it reports whether the batch in flight waits for a lock that another process holds.
func (m *Session) Waits() bool { return m.held.Load() }

// obtain takes the lock, or fails when the context ends. waited reports whether another process held it.
func (s *LockStore) obtain(ctx context.Context, lock string, held *atomic.Bool) (token string, waited bool, err error) {
	var refused error
	pause := script.NewPause()
	for {
		patience := &patience{seen: held}
		token = strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
		attempt, cancel := context.WithTimeout(ctx, s.lockTTL)
		_, err = s.locker.Obtain(attempt, lock, s.lockTTL, &redislock.Options{Token: token, RetryStrategy: patience})
		ended := attempt.Err() != nil
		cancel()
		if !ended { // an attempt that has ended may have waited for the lock, whatever the pool looks like now
			err = s.poolError(lock, err)
		}
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
			s.release(lock, token) // the reply may be lost and the lock taken all the same
			if err != nil && strings.Contains(err.Error(), "WRONGTYPE") {
				err = wrongType(lock)
			}
			return "", false, err
		}
		s.release(lock, token)
		waited = true
		switch {
		case ctx.Err() == nil:
		case held.Load():
			return "", true, fmt.Errorf("%w: key %q", permit.ErrLockNotObtained, lock)
		case refused != nil:
			return "", false, refused
		case s.poolUsedUp(lock):
			return "", true, fmt.Errorf("%w: key %q: %w", permit.ErrPoolExhausted, lock, err)
		default:
			return "", false, fmt.Errorf("%w: key %q", permit.ErrStoreTimeout, lock)
		}
		// A lock that is held for longer than its time to live has no holder: the server's clock was set back, or it has no expiry.
		if _, err := s.run(ctx, &ClipScript, 1, lock, strconv.FormatInt(s.lockTTL.Milliseconds(), 10)); err != nil {
			return "", false, err
		}
	}
}

// release removes a lock if the token is still in it. It runs in the background, with a context of its own.
func (s *LockStore) release(lock, token string) {
	go func() {
		defer s.logger.Recovered()
		ctx, cancel := context.WithTimeout(context.Background(), s.lockTTL)
		defer cancel()
		s.releaseNow(ctx, lock, token)
	}()
}

// releaseNow is release in the caller's goroutine. If it fails, the lock expires after its time to live.
func (s *LockStore) releaseNow(ctx context.Context, lock, token string) {
	// Without a new state the script does not touch the bucket. So it needs no key of a bucket, which may be on another server than the lock.
	_, _ = s.run(ctx, &CommitScript, 2, lock, lock, token, "", "", "", "", "", "", "")
}

// holding is a batch that is being decided under its bucket's lock.
type holding struct {
	*LockStore
	batch   *permit.Batch
	session *Session
	scratch *scratch
	token   string
	now     string // see clockArg
	server  clock.Remote
}

// underLock decides a batch and commits it, under the lock. It commits a prediction without reading, and reads the state if there is none or if
// it was wrong. It reports false if the fence stopped the commit: nothing was written, and the lock may still be held.
func (s *LockStore) underLock(ctx context.Context, batch *permit.Batch, m *Session, token string) (done bool, err error) {
	w := s.scratches.Get().(*scratch)
	defer s.scratches.Put(w)
	h := &holding{LockStore: s, batch: batch, session: m, scratch: w, token: token, now: s.clockArg(batch), server: batch.Server()}
	var reply []string
	asked := clock.Mono()
	if m.predict(batch, h.asOf(), w) {
		reply, err = h.commit(ctx, strconv.FormatInt(w.prediction.asOf, 10), m.text, w.prediction.text, "")
	} else {
		reply, err = s.run(ctx, &ReadScript, 2, m.bucket, m.lock, token, h.now)
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
		m.confirmed(w, &batch.Outcome)
		batch.Outcome.ClockMicros, err = strconv.ParseInt(reply[1], 10, 64)
		return true, err
	}
	micros, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return false, err
	}
	h.server.Heard(micros, asked, clock.Mono())
	return h.decideOn(ctx, micros, reply[2])
}

// asOf returns a time that the deciding clock has certainly reached; 0 if it is not known yet.
func (h *holding) asOf() int64 {
	if !h.local {
		return asOf(&h.server)
	}
	at, _ := strconv.ParseInt(h.now, 10, 64)
	return at
}

// decideOn decides on a state that was read, and commits the result.
func (h *holding) decideOn(ctx context.Context, micros int64, old string) (done bool, err error) {
	m, out := h.session, &h.batch.Outcome
	b := h.scratch.left
	if err := b.Parse(old, h.batch.Terms); err != nil {
		return false, corruptKey(m.bucket, err)
	}
	if err = b.Decide(micros, h.batch, out); err != nil {
		return false, err
	}
	text := ""
	if out.Changed {
		text = string(h.scratch.text())
	}
	ttl, _ := b.TTLMillis(out.NowMicros, h.batch)
	reply, err := h.commit(ctx, "", old, text, strconv.FormatInt(ttl, 10))
	switch {
	case err != nil:
		return false, err
	case reply[0] == "late":
		return false, h.tooLate(h.batch)
	case reply[0] == "done":
		m.remember(old, h.batch, b, text)
	}
	return reply[0] == "done", nil
}

// commit replaces the old state by the new one. It keeps the lock for the next batch if other processes wait and maxBatches allows it.
func (h *holding) commit(ctx context.Context, predictedAt, old, new, ttl string) ([]string, error) {
	m, keep := h.session, ""
	if m.batches < maxBatches {
		keep = strconv.FormatInt(min(h.lockTTL, keptTTL).Milliseconds(), 10)
	}
	reply, err := h.run(ctx, &CommitScript, 2, m.bucket, m.lock, h.token, h.now, predictedAt,
		h.deadlineArg(timeOf(ctx), &h.server), old, new, ttl, keep)
	if err == nil && reply[0] == "done" && new != "" && keep != "" {
		m.token, m.owner = h.token, h.LockStore
	}
	return reply, err
}
