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
	keys := make([]string, 0, 2*len(names))
	for _, name := range names {
		bucket, lock := s.Keys(name)
		keys = append(keys, bucket, lock)
	}
	read := append(keys, "", "", "")
	for range keys {
		read = append(read, "")
	}
	args := read
	m, ok := ctx.Value(sessionKey{}).(*Session)
	if !ok {
		m = new(Session)
	}
	m.held.Store(false) // an earlier batch may have set it
	for pause := script.NewPause(); ; {
		args[len(keys)] = s.now() // after a wait, the time has moved on
		asked := clock.Mono()
		reply, err := s.run(ctx, &ExchangeScript, len(keys), args...)
		switch {
		case err == nil:
		case script.NotExecuted(err) && pause.Wait(ctx):
			continue
		default:
			return err
		}
		m.held.Store(reply[0] == "locked")
		switch reply[0] {
		case "done":
			s.reviewEviction(keys[0])
			return nil
		case "late":
			return fmt.Errorf("%w: key %q: the script ran too late and wrote nothing", permit.ErrStoreTimeout, keys[0])
		case "locked":
			if err := s.clip(ctx, keys, reply[1]); err != nil {
				return err
			}
			if !pause.Wait(ctx) {
				return fmt.Errorf("%w: key %q: held for %s ms more", permit.ErrLockNotObtained, keys[0], reply[1])
			}
			args = read
			continue
		}
		writes := false
		if args, writes, err = s.exchanged(ctx, decide, keys, reply, asked); err != nil || !writes {
			return err
		}
	}
}

// clip shortens locks with more time left than LockTTL, or without an expiry. Such a lock has no holder any more.
func (s *Store) clip(ctx context.Context, keys []string, left string) error {
	most := s.lockTTL.Milliseconds()
	if n, err := strconv.ParseInt(left, 10, 64); err == nil && 0 <= n && n <= most {
		return nil
	}
	for i := 1; i < len(keys); i += 2 {
		if _, err := s.run(ctx, &ClipScript, 1, keys[i], strconv.FormatInt(most, 10)); err != nil {
			return err
		}
	}
	return nil
}

// exchanged decides on the states in a reply, and returns the arguments of the call that writes the result.
func (s *Store) exchanged(ctx context.Context, decide Decide, keys, reply []string, asked time.Duration) (args []string, writes bool, err error) {
	now, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return nil, false, err
	}
	var server clock.Remote
	server.Heard(now, asked, clock.Mono())
	found := reply[2:]
	states := make([][]byte, len(found))
	for i, text := range found {
		if len(text) > longestText {
			return nil, false, corruptKey(keys[2*i], fmt.Errorf("want at most %d bytes", longestText))
		}
		if text != "" {
			states[i] = []byte(text)
		}
	}
	next, ttl, err := decide(now, states)
	if err != nil {
		return nil, false, err
	}
	args = append(keys[:len(keys):len(keys)], "", s.deadlineArg(timeOf(ctx), &server), strconv.FormatInt(max(1, ttl.Milliseconds()), 10))
	for i, text := range found {
		args = append(args, text, string(next[i]))
		writes = writes || next[i] != nil
	}
	return args, writes, nil
}

// now returns the time that a script decides by for a batch without a limiter's clock: "" for the server's clock.
func (s *Store) now() string {
	if !s.local {
		return ""
	}
	return strconv.FormatInt(time.Now().UnixMicro(), 10)
}
