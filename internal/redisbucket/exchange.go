package redisbucket

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// longestText is the longest value that lua/exchange.lua reads completely. Of a longer value it reads one byte more.
const longestText = 1 << 20

// Decide decides on states as text at a time of the store's clock. It returns what to write, and for how long that must be kept. See
// tokenbucket.Batch.
type Decide = func(nowMicros int64, states [][]byte) (next [][]byte, ttl time.Duration, err error)

// sessionKey is the key of a batch's session in a context. A wrapper may give a store a batch of its own; the context still leads to the
// session.
type sessionKey struct{}

// WithSession returns a context with the session of a batch.
func WithSession(ctx context.Context, s permit.Session) context.Context {
	return context.WithValue(ctx, sessionKey{}, s)
}

// Exchange reads the states of one or more buckets, has a batch decide on them, and writes the result if no state has changed meanwhile;
// otherwise it starts over. It takes no lock, and waits while another process holds one. On a cluster all keys must be in one slot.
func (s *Store) Exchange(ctx context.Context, names []string, decide Decide) error {
	x := &exchange{Store: s}
	for _, name := range names {
		bucket, lock := s.Keys(name)
		x.buckets, x.locks = append(x.buckets, bucket), append(x.locks, lock)
	}
	x.read()
	m, ok := ctx.Value(sessionKey{}).(*Session)
	if !ok {
		m = new(Session)
	}
	m.held.Store(false) // an earlier batch may have set it
	for pause := script.NewPause(); ; {
		asked := clock.Mono()
		reply, err := x.run(ctx)
		switch {
		case err == nil:
		case script.KeysApart(err) && (x.moving == nil || pause.Wait(ctx)):
			if err = x.moves(ctx); err != nil {
				return err
			}
			continue
		case script.NotExecuted(err) && pause.Wait(ctx):
			continue
		default:
			return err
		}
		m.held.Store(reply[0] == "locked")
		switch reply[0] {
		case "done":
			s.reviewEviction(x.buckets[0])
			return nil
		case "late":
			return fmt.Errorf("%w: key %q: the script ran too late and wrote nothing", permit.ErrStoreTimeout, x.buckets[0])
		case "locked":
			if err := s.clip(ctx, x.locks, reply[1]); err != nil {
				return err
			}
			if !pause.Wait(ctx) {
				return fmt.Errorf("%w: key %q: held for %s ms more", permit.ErrLockNotObtained, x.buckets[0], reply[1])
			}
			x.read()
			continue
		}
		if writes, err := x.decide(ctx, decide, reply, asked); err != nil || !writes {
			return err
		}
	}
}

// exchange is the state of an Exchange between two runs of the script.
type exchange struct {
	*Store
	buckets, locks []string
	moving         []string // the keys to declare while their slot moves, see moves.go; nil: all
	deadline, ttl  string
	texts          []string // for each bucket two: the state that it must have, and the new one
}

// read makes the next run a read.
func (x *exchange) read() { x.deadline, x.ttl, x.texts = "", "", make([]string, 2*len(x.buckets)) }

// moves makes the script declare the keys of the buckets alone, without their locks; once it does, only those of the buckets that exist.
func (x *exchange) moves(ctx context.Context) (err error) {
	if x.moving == nil {
		x.moving = x.buckets
	} else {
		x.moving, err = x.existing(ctx, x.buckets)
	}
	return err
}

// run runs the script once, at the current time.
func (x *exchange) run(ctx context.Context) ([]string, error) {
	args := make([]string, 0, 3+5*len(x.buckets))
	args = append(args, x.moving...)
	if x.moving == nil {
		for i, bucket := range x.buckets {
			args = append(args, bucket, x.locks[i])
		}
	}
	keys := len(args)
	args = append(args, x.now(), x.deadline, x.ttl)
	args = append(args, x.texts...)
	if x.moving != nil {
		args = append(args, x.buckets...)
	}
	return x.Store.run(ctx, &ExchangeScript, keys, args...)
}

// clip shortens locks with more time left than LockTTL, or without an expiry. Such a lock has no holder any more.
func (s *Store) clip(ctx context.Context, locks []string, left string) error {
	most := s.lockTTL.Milliseconds()
	if n, err := strconv.ParseInt(left, 10, 64); err == nil && 0 <= n && n <= most {
		return nil
	}
	for _, lock := range locks {
		if _, err := s.run(ctx, &ClipScript, 1, lock, strconv.FormatInt(most, 10)); err != nil {
			return err
		}
	}
	return nil
}

// decide decides on the states in a reply, and makes the next run write the result. It reports whether there is anything to write.
func (x *exchange) decide(ctx context.Context, decide Decide, reply []string, asked time.Duration) (writes bool, err error) {
	now, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return false, err
	}
	var server clock.Remote
	server.Heard(now, asked, clock.Mono())
	found := reply[2:]
	states := make([][]byte, len(found))
	for i, text := range found {
		if len(text) > longestText {
			return false, corruptKey(x.buckets[i], fmt.Errorf("want at most %d bytes", longestText))
		}
		if text != "" {
			states[i] = []byte(text)
		}
	}
	next, ttl, err := decide(now, states)
	if err != nil {
		return false, err
	}
	x.deadline, x.ttl, x.texts = x.deadlineArg(timeOf(ctx), &server), strconv.FormatInt(max(1, ttl.Milliseconds()), 10), nil
	for i, text := range found {
		x.texts = append(x.texts, text, string(next[i]))
		writes = writes || next[i] != nil
	}
	return writes, nil
}

// now returns the time that a script decides by for a batch without a limiter's clock: "" for the server's clock.
func (s *Store) now() string {
	if !s.local {
		return ""
	}
	return strconv.FormatInt(time.Now().UnixMicro(), 10)
}
