package semaphore

import (
	"cmp"
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
//   - lua/pack.lua puts the state into one key, if the keys with the state, the leases and their permits are on one server. If only the key state is
//     at the source, lua/fetch.lua and lua/adopt.lua take it to the others before. From then on lua/quiet.lua decides with that key alone, wherever
//     it is. It has no queue: requests that cannot be granted wait in their processes, which send them again (store.Partial).
//   - If the state is too large for one key, and all keys that exist are at the target, lua/apply.lua declares only them. Those that do not exist
//     are not at the source, which cannot make a key while its slot moves away, so the script can make them at the target.
//   - Otherwise lua/leases.lua releases and renews permits: it needs only the key with the leases. Everything else waits.

const (
	// movesFor is how long the keys count as being on two servers after they were found there.
	movesFor = 250 * time.Millisecond
	// movingPause is the shortest pause after a batch of which not everything could be decided.
	movingPause = 5 * time.Millisecond
	// unqueued is the patience of a batch whose requests do not enter the store's queue.
	unqueued = -1
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

// moving puts the state into one key, and if that is impossible, runs lua/apply.lua with the keys that exist.
func (r *redisStore) moving(ctx context.Context, client script.Client, b *store.Batch) ([]string, error) {
	var lookups []script.Lookup
	for i, command := range []string{"HLEN", "ZCARD", "HLEN", "ZCARD", "HLEN", "HLEN"} {
		lookups = append(lookups, script.Lookup{Key: r.keys[i], Command: command, Missing: "0"})
	}
	found, err := script.Existing(ctx, client, lookups)
	if err != nil {
		return nil, err
	}
	needed := r.keys[:1:1]
	for _, key := range found {
		if slices.Contains(r.keys[1:3], key) {
			needed = append(needed, key)
		}
	}
	pack := func() ([]string, error) { return packScript.RunTogether(ctx, client, len(needed), needed...) }
	packed, err := pack()
	if script.KeysApart(err) && r.fetch(ctx, client) == nil {
		packed, err = pack()
	}
	switch {
	case err == nil && len(packed) > 0:
		return nil, errApart
	case err != nil && !script.KeysApart(err):
		return nil, err
	}
	return applyScript.RunTogether(ctx, client, len(found), r.arguments(found, b)...)
}

// fetch moves the state to the target, where the leases are: some servers move the newest keys first, and the state is the oldest. It returns an
// error if the state stays or is lost.
func (r *redisStore) fetch(ctx context.Context, client script.Client) error {
	fields, err := fetchScript.Run(ctx, client, 1, r.keys[0], r.keys[1], r.keys[2])
	if err != nil || len(fields) == 0 {
		return cmp.Or[error](err, errApart)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second) // the fields are nowhere else
	defer cancel()
	_, err = adoptScript.Run(ctx, client, 1, append(r.keys[:1:1], fields...)...)
	return err
}

// partly decides what can be decided of a batch while the keys are on two servers. It returns a [store.Partial], or the error of a script.
func (r *redisStore) partly(ctx context.Context, client script.Client, b *store.Batch, why error) error {
	p := &store.Partial{Err: why}
	packed, err := r.packed(ctx, client, b, p)
	r.quiet.Store(packed)
	if err == nil && !packed && len(b.Leave)+len(b.Renew) > 0 {
		err = r.leases(ctx, client, b, p)
	}
	if err != nil {
		return err
	}
	if !packed && !slices.Contains(p.Left, store.Holding) && !slices.Contains(p.Renewed, true) {
		script.Sleep(ctx, movingPause)
	}
	return p
}

// packed decides a batch with lua/quiet.lua, and reports whether the state allowed that. Permits that are released are free for other processes
// before requests of the batch take some. Otherwise a process would pass them on among its own callers for ever, since there is no queue.
func (r *redisStore) packed(ctx context.Context, client script.Client, b *store.Batch, p *store.Partial) (bool, error) {
	ends, enters := *b, *b
	ends.Enter, enters.Leave, enters.Renew = nil, nil, nil
	if b.SetPermits != 0 || b.AddPermits != 0 { // the entries are decided by the new number
		enters.Enter = nil
	}
	parts := []*store.Batch{&ends, &enters}
	switch {
	case len(enters.Enter) == 0: // maybe a heartbeat, which finds out that the store has no waiters
		parts = parts[:1]
	case len(b.Leave)+len(b.Renew) == 0:
		parts = parts[1:]
	}
	for _, part := range parts {
		part.SetPermits, part.AddPermits, part.PatienceMicros = 0, 0, unqueued
		report, err := r.quietly(ctx, client, part)
		if err != nil && p.Fresh { // what has ended is certain; the entries are sent again
			p.Err = err
			return true, nil
		}
		if report == nil || err != nil {
			return p.Fresh, err
		}
		p.Left, p.Renewed, p.Entered, p.Fresh = append(p.Left, report.Left...), append(p.Renewed, report.Renewed...), report.Entered, true
	}
	return p.Fresh, nil
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
