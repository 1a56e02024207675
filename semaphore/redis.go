package semaphore

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// RedisClient is the part of a client that a semaphore uses. *redis.Client, *redis.ClusterClient, *redis.Ring and the sentinel clients have
// it. A *redis.Ring of several shards also needs a RingOptions.HeartbeatFn that returns true for a shard that does not reply. Otherwise it
// moves keys to other shards, and NewRedis returns an error.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// NewRedis returns a semaphore in Redis. All processes that use the same name share it. permits is in force for all of them if its version
// is the highest ([WithVersion]). As long as no process has a version, each process's number decides its own requests.
//
// Acquire and Release run one script each, of three commands while no request waits. Concurrent calls share scripts. Grants to waiters are
// published by Pub/Sub: while requests wait, a process keeps one connection for each semaphore. A lost message is detected within two
// seconds, or two thirds of a lease if that is less. All keys of a semaphore are in one slot, and expire one or two days after its last
// use. However many requests wait or hold permits, no script looks at more than a thousand of them, unless Redis has evicted a key or its
// clock was set back.
//
// Times are those of the server. If its clock is set back, time stands still, or leases keep their length. If it leaps forwards by more
// than two thirds of a lease (a tenth of a fixed one), leases end early. Until the next renewal (a third of a lease) other requests may
// then be granted as well; the fence lets the resource refuse the older holder.
//
// While no other call of the process is in flight, a lone caller with a *redis.Client runs the script in its own goroutine, which is
// faster. If its context is cancelled meanwhile, it returns when Redis has replied, or after the timeout ([WithStoreTimeout]). The client's
// hooks are called for it only if the client has ContextTimeoutEnabled.
//
// NewRedis needs Redis 6 or later. The scripts use TIME, the commands of hashes and sorted sets, DEL, PUBLISH and PEXPIRE. They also run on
// stand-ins without the Lua library struct, such as miniredis.
func NewRedis(client RedisClient, name string, permits int, opts ...Option) (*Semaphore, error) {
	s := &Semaphore{name: name}
	o, err := s.options(permits, opts)
	if err != nil {
		return nil, err
	}
	if err := script.Usable(client); err != nil {
		return nil, s.bad("client", err, "a redis client")
	}
	if script.MovesKeys(client) {
		return nil, s.bad("client", script.MovingRing, script.PinnedRing)
	}
	base := o.prefix + "{" + script.EncodeName(name) + "}:"
	b := &redisStore{client: client, channel: base + "wake:"}
	for i, part := range []string{"state", "held", "info", "queue", "procs", "idle"} {
		b.keys[i] = base + part
	}
	return New(b, name, permits, opts...)
}

// redisStore keeps a semaphore in Redis.
type redisStore struct {
	client  RedisClient
	keys    [6]string
	channel string
	unheard sync.Once    // logs that Redis refuses SUBSCRIBE
	quiet   atomic.Bool  // according to the last reply, lua/quiet.lua can decide the next batch
	apartAt atomic.Int64 // clock.Mono when the keys were last found on two servers; 0 if never
}

var (
	//go:embed lua/parse.lua
	parseSource string
	//go:embed lua/apply.lua
	applySource string
	//go:embed lua/fetch.lua
	fetchSource string
	//go:embed lua/adopt.lua
	adoptSource string
	//go:embed lua/holders.lua
	holdersSource string
	//go:embed lua/leases.lua
	leasesSource string
	//go:embed lua/pack.lua
	packSource string
	//go:embed lua/stats.lua
	statsSource string

	applyScript   = script.New(parseSource + applySource)
	fetchScript   = script.New(fetchSource)
	adoptScript   = script.New(adoptSource)
	holdersScript = script.New(parseSource + holdersSource)
	leasesScript  = script.New(leasesSource)
	packScript    = script.New(packSource)
	statsScript   = script.New(parseSource + statsSource)
	probeScript   = script.New("redis.call('HSET', KEYS[1], '', '') redis.call('PEXPIRE', KEYS[1], 1000) return {}")
)

// Apply implements store.Store.
func (r *redisStore) Apply(ctx context.Context, b *store.Batch) (*store.Report, error) {
	return r.applyBy(ctx, r.client, b)
}

// applyBy is Apply with another client of the same server.
func (r *redisStore) applyBy(ctx context.Context, client script.Client, b *store.Batch) (*store.Report, error) {
	if r.quiet.Load() && !r.moves() {
		report, err := r.quietly(ctx, client, b)
		if report != nil || err != nil {
			return report, err
		}
	}
	return b.InSteps(func(b *store.Batch) (*store.Report, bool, error) { return r.step(ctx, client, b) })
}

// step runs lua/apply.lua. If it returns unfinished, the script must run again for Enter.
func (r *redisStore) step(ctx context.Context, client script.Client, b *store.Batch) (_ *store.Report, unfinished bool, _ error) {
	if r.moves() {
		return nil, false, r.partly(ctx, client, b, errApart)
	}
	reply, err := applyScript.RunTogether(ctx, client, len(r.keys), r.arguments(r.keys[:], b)...)
	if script.KeysApart(err) && (!r.quiet.Load() || b.SetPermits != 0 || b.AddPermits != 0) {
		reply, err = r.moving(ctx, client, b)
	}
	if script.KeysApart(err) {
		r.apartAt.Store(int64(clock.Mono()))
		return nil, false, r.partly(ctx, client, b, err)
	}
	if err != nil {
		return nil, false, r.failed(ctx, client, err)
	}
	report, quiet, unfinished, ok := parse(b, reply)
	if !ok {
		return nil, false, r.unexpected(reply)
	}
	if r.quiet.Load() != quiet && !report.Late {
		r.quiet.Store(quiet)
	}
	return report, unfinished, nil
}

// arguments returns the given keys and the arguments of lua/apply.lua.
func (r *redisStore) arguments(keys []string, b *store.Batch) []string {
	args := make([]string, 0, len(keys)+15+len(b.Leave)+len(b.Renew)+5*len(b.Enter))
	args = append(args, keys...)
	integers := func(ns ...int64) {
		for _, n := range ns {
			args = append(args, strconv.FormatInt(n, 10))
		}
	}
	args = append(args, b.Process, b.Label)
	integers(b.LeaseMicros, b.PatienceMicros, b.AliveMicros, int64(b.Permits), int64(b.Limit.Permits), b.Limit.Version,
		int64(b.SetPermits), int64(b.AddPermits), b.Deadline)
	args = append(args, r.channel)
	integers(int64(len(b.Leave)))
	args = append(args, b.Leave...)
	integers(int64(len(b.Renew)))
	args = append(args, b.Renew...)
	integers(int64(len(b.Enter)))
	for _, e := range b.Enter {
		wait := int64(0)
		if e.Wait {
			wait = 1
		}
		args = append(args, e.ID)
		integers(int64(e.Permits), e.Ticket, wait)
		args = append(args, e.Label)
	}
	return args
}

// unexpected returns the error of a reply that does not parse.
func (r *redisStore) unexpected(reply []string) error {
	return fmt.Errorf("%w: unexpected reply %.80q", ErrCorruptState, reply)
}

// failed returns the error of a script. It recognises corrupt states, and looks for the cause of errors without details.
func (r *redisStore) failed(ctx context.Context, client script.Client, err error) error {
	if strings.Contains(err.Error(), "WRONGTYPE") || redis.HasErrorPrefix(err, "CORRUPT") {
		return fmt.Errorf("%w: keys %s*", ErrCorruptState, strings.TrimSuffix(r.keys[0], "state"))
	}
	return script.Explain(ctx, client, err)
}

// Listen implements store.Store.
func (r *redisStore) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	sub := r.client.Subscribe(ctx, r.channel+process)
	defer func() { _ = sub.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = sub.Close() }) // Receive ignores its context while it reads
	defer stop()
	for {
		message, err := sub.Receive(ctx) // after an error it connects and subscribes again
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if redis.HasErrorPrefix(err, "NOPERM") {
			r.unheard.Do(func() {
				slog.Warn("semaphore: Redis refuses SUBSCRIBE, so requests that wait learn late of free permits; give the user +subscribe and the channels &"+r.channel+"*",
					"error", err)
			})
		}
		if err != nil {
			return err
		}
		switch m := message.(type) {
		case *redis.Subscription:
			ready()
		case *redis.Message:
			if g, ok := parseGrant(m.Payload); ok {
				wake(g)
			}
		}
	}
}

// Holders implements store.Store.
func (r *redisStore) Holders(ctx context.Context) ([]store.Holder, error) {
	var all []store.Holder
	for cursor, more := "0", true; more; more = cursor != "0" {
		part, next, err := r.someHolders(ctx, cursor)
		if err != nil {
			return nil, err
		}
		all, cursor = append(all, part...), next
	}
	slices.SortFunc(all, func(a, b store.Holder) int { return cmp.Or(cmp.Compare(a.Fence, b.Fence), cmp.Compare(a.ID, b.ID)) })
	return slices.CompactFunc(all, func(a, b store.Holder) bool { return a.ID == b.ID }), nil
}

// someHolders runs lua/holders.lua.
func (r *redisStore) someHolders(ctx context.Context, cursor string) (all []store.Holder, next string, _ error) {
	reply, err := holdersScript.Run(ctx, r.client, 3, append(r.keys[:3:3], cursor)...)
	if err != nil {
		return nil, "", r.failed(ctx, r.client, err)
	}
	if len(reply)%3 != 1 {
		return nil, "", r.unexpected(reply)
	}
	next = reply[0]
	for reply = reply[1:]; len(reply) > 0; reply = reply[3:] {
		fields := strings.SplitN(reply[2], " ", 5)
		var h store.Holder
		expires, err := strconv.ParseInt(reply[1], 10, 64)
		if err != nil || len(fields) != 5 {
			return nil, "", fmt.Errorf("%w: holder %.80q", ErrCorruptState, reply[:3])
		}
		h.ID, h.Expires, h.Label = reply[0], time.UnixMicro(expires), fields[4]
		h.Permits, _ = strconv.Atoi(fields[0])
		h.Fence, _ = strconv.ParseInt(fields[2], 10, 64)
		since, _ := strconv.ParseInt(fields[3], 10, 64)
		h.Since = time.UnixMicro(since)
		all = append(all, h)
	}
	return all, next, nil
}

// reach sends a probe: a write in the semaphore's slot, which a replica, a full server or one without enough replicas refuses as it would
// refuse a batch. It needs no rights besides those of a batch, and is not sent twice.
func (r *redisStore) reach(ctx context.Context) error {
	cmd := probeScript.Call(ctx, true, 1, []string{strings.TrimSuffix(r.keys[0], "state") + "probe"})
	err := r.client.Process(ctx, cmd)
	if err == nil {
		err = cmd.Err()
	}
	if err != nil {
		script.Reload(ctx, r.client, err)
		return r.failed(ctx, r.client, err)
	}
	return nil
}

// Stats implements store.Store.
func (r *redisStore) Stats(ctx context.Context) (store.Stats, error) {
	reply, err := statsScript.Run(ctx, r.client, 4, r.keys[:4]...)
	if err != nil {
		return store.Stats{}, r.failed(ctx, r.client, err)
	}
	var permits, used, waiting int64
	var s store.Stats
	in := &replyReader{rest: reply}
	if in.numbers(&permits, &s.Version, &used, &waiting); in.bad {
		return store.Stats{}, r.unexpected(reply)
	}
	s.Permits, s.Used, s.Waiting = int(permits), int(used), int(waiting)
	return s, nil
}
