package tokenbucket

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// exchange has a batch decide on states as text, on several buckets together, and writes what it says if nothing has changed
// meanwhile; else it decides anew. It needs no lock, and waits while somebody else holds one. With a cluster all keys must be in one slot.
func (s *redisBase) exchange(ctx context.Context, b *Batch) error {
	names := b.Names
	keys := make([]string, 0, 2*len(names))
	for _, name := range names {
		bucket, lock := s.keysOf(name)
		keys = append(keys, bucket, lock)
	}
	read := append(keys, "", "", "")
	for range keys {
		read = append(read, "")
	}
	args := read
	m, ok := ctx.Value(storeCacheKey{}).(*cachedState)
	if !ok {
		m = new(cachedState)
	}
	m.held.Store(false) // it was, perhaps, when another batch waited
	for pause := script.NewPause(); ; {
		args[len(keys)] = s.now() // others may have decided since
		asked := clock.Mono()
		reply, err := s.run(ctx, &exchangeScript, len(keys), args...)
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
			return nil
		case "late":
			return fmt.Errorf("%w: key %q: the script ran too late and wrote nothing", ErrStoreTimeout, keys[0])
		case "locked":
			if err := s.clip(ctx, keys, reply[1]); err != nil {
				return err
			}
			if !pause.Wait(ctx) {
				return fmt.Errorf("%w: key %q: held for %s ms more", ErrLockNotObtained, keys[0], reply[1])
			}
			args = read
			continue
		}
		writes := false
		if args, writes, err = s.exchanged(ctx, b, keys, reply, asked); err != nil || !writes {
			return err
		}
	}
}

// clip shortens locks that have more time left than any is given, or no expiry: nobody holds such a one any more.
func (s *redisBase) clip(ctx context.Context, keys []string, left string) error {
	most := s.lockTTL.Milliseconds()
	if n, err := strconv.ParseInt(left, 10, 64); err == nil && 0 <= n && n <= most {
		return nil
	}
	for i := 1; i < len(keys); i += 2 {
		if _, err := s.run(ctx, &clipScript, 1, keys[i], strconv.FormatInt(most, 10)); err != nil {
			return err
		}
	}
	return nil
}

// exchanged decides on what was read, and returns the arguments to write that with.
func (s *redisBase) exchanged(ctx context.Context, b *Batch, keys, reply []string, asked time.Duration) (args []string, writes bool, err error) {
	now, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return nil, false, err
	}
	var server clock.Remote
	server.Heard(now, asked, clock.Mono())
	found := reply[2:]
	states := make([][]byte, len(found))
	for i, text := range found {
		if text != "" {
			states[i] = []byte(text)
		}
	}
	next, ttl, err := b.Decide(now, states)
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

// now is the time for a script to decide by if nobody has asked who has a clock, "" for the server's.
func (s *redisBase) now() string {
	if !s.local {
		return ""
	}
	return strconv.FormatInt(time.Now().UnixMicro(), 10)
}
