package semaphore

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// While a slot of a cluster moves, the source serves the keys that it still has, and redirects a command whose keys it does not have to the
// target. It refuses a command with some of both (TRYAGAIN), for the whole move if a key does not exist at all. Of a semaphore's keys, some
// mostly do not exist. So a batch that is refused is decided otherwise:
//
//   - At the source lua/pack.lua puts the state into one key. From then on lua/quiet.lua decides with that alone, wherever the key is. It has no
//     queue: requests that cannot be granted wait in their processes, which send them again (store.Partial).
//   - Once all keys that exist are at the target, lua/apply.lua declares only them. Those that do not exist are not at the source, which cannot
//     make a key while its slot moves away, so the script can make them at the target.
//   - If keys are at both, lua/leases.lua releases and renews permits: it needs only the key with the leases. Everything else waits. So it is if
//     the state is too large for one key.

const (
	// movesFor is how long the keys count as being on two servers after they were found there.
	movesFor = 250 * time.Millisecond
	// movingPause is the pause after a batch of which nothing could be decided.
	movingPause = 5 * time.Millisecond
)

// errApart is the error of a batch that needs all keys, within movesFor. It is the reply that the server would send.
const errApart = redisError("TRYAGAIN the keys of the semaphore were on two servers")

type redisError string

func (r redisError) Error() string { return string(r) }

// RedisError implements redis.Error.
func (redisError) RedisError() {}

// moves reports whether the keys count as being on two servers.
func (r *redisStore) moves() bool {
	at := r.apartAt.Load()
	return at != 0 && clock.Mono()-time.Duration(at) < movesFor
}

// moving runs lua/apply.lua with the keys that exist. If that is impossible, too, it puts the state into one key.
func (r *redisStore) moving(ctx context.Context, client script.Client, b *store.Batch) ([]string, error) {
	var lookups []script.Lookup
	for i, command := range []string{"HLEN", "ZCARD", "HLEN", "ZCARD", "HLEN", "HLEN"} {
		lookups = append(lookups, script.Lookup{Key: r.keys[i], Command: command, Missing: "0"})
	}
	found, err := script.Existing(ctx, client, lookups)
	if err != nil {
		return nil, err
	}
	reply, err := applyScript.RunTogether(ctx, client, len(found), r.arguments(found, b)...)
	if script.KeysApart(err) {
		packed, failed := packScript.RunTogether(ctx, client, len(found), found...)
		if failed != nil && !script.KeysApart(failed) {
			return nil, failed
		}
		if len(packed) > 0 {
			r.quiet.Store(true)
		}
	}
	return reply, err
}

// partly decides what can be decided of a batch while the keys are on two servers. It returns a [store.Partial], or the error of a script.
func (r *redisStore) partly(ctx context.Context, client script.Client, b *store.Batch, why error) error {
	p := &store.Partial{Err: why}
	packed := true
	if len(b.Leave)+len(b.Renew) > 0 {
		first := *b
		first.Enter, first.SetPermits, first.AddPermits, first.PatienceMicros = nil, 0, 0, 0
		report, err := r.quietly(ctx, client, &first)
		if packed = report != nil; packed {
			p.Left, p.Renewed, p.Fresh = report.Left, report.Renewed, true
		} else if err == nil {
			err = r.leases(ctx, client, b, p)
		}
		if err != nil {
			return err
		}
	}
	if packed {
		var err error
		if p.Entered, err = r.enterQuietly(ctx, client, b); err != nil {
			return err
		}
	}
	if !slices.Contains(p.Left, store.Holding) && !slices.Contains(p.Renewed, true) && len(p.Entered) == 0 {
		script.Sleep(ctx, movingPause)
	}
	return p
}

// enterQuietly decides the first of the entries of a batch, one after the other, as far as they need no queue.
func (r *redisStore) enterQuietly(ctx context.Context, client script.Client, b *store.Batch) (results []store.Result, _ error) {
	if b.SetPermits != 0 || b.AddPermits != 0 { // the entries are decided by the new number
		return nil, nil
	}
	one := *b
	one.Leave, one.Renew, one.PatienceMicros = nil, nil, 0 // the process has no waiters in this state
	for i := range b.Enter {
		one.Enter = b.Enter[i : i+1]
		report, err := r.quietly(ctx, client, &one)
		if report == nil || err != nil {
			return results, err
		}
		results = append(results, report.Entered...)
	}
	return results, nil
}

// leases runs lua/leases.lua, and records what it has done.
func (r *redisStore) leases(ctx context.Context, client script.Client, b *store.Batch, p *store.Partial) error {
	args := []string{r.keys[1], strconv.FormatInt(b.LeaseMicros, 10), strconv.Itoa(len(b.Leave))}
	args = append(append(args, b.Leave...), b.Renew...)
	reply, err := leasesScript.Run(ctx, client, 1, args...)
	if err != nil {
		return r.failed(ctx, client, err)
	}
	if len(reply) != 1+len(b.Leave)+len(b.Renew) {
		return r.unexpected(reply)
	}
	for i, done := range reply[1:] {
		switch {
		case i >= len(b.Leave):
			p.Renewed = append(p.Renewed, done == "1")
		case done == "1":
			p.Left = append(p.Left, store.Holding)
		default:
			p.Left = append(p.Left, store.Gone)
		}
	}
	return nil
}
