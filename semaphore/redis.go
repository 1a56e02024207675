package semaphore

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// RedisClient is the least that is needed of a client. *redis.Client, *redis.ClusterClient, *redis.Ring and the sentinel
// clients have it.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// NewRedis returns a semaphore in Redis. All processes that use the same name share it. permits is in force for all of them if its
// version is the newest ([WithVersion]). As long as no process has a version, permits counts for the process' own requests.
//
// Acquire and Release are one script each, of three commands while nobody waits. They travel together when many ask at once. Waiters are
// told of their turn by Pub/Sub: while somebody waits, a process keeps one connection for it for each semaphore. A message that is lost is
// noticed within two seconds (two thirds of a lease, if that is less). All keys of a semaphore are in one slot, and expire a day or
// two after it was used last. However many wait or hold permits, no script looks at more than a thousand of them, unless Redis has evicted
// a key or its clock was set back.
//
// Time is the server's. If its clock is set back, time stands still, or leases keep their length. If it leaps forwards by more than
// two thirds of a lease (a tenth of a fixed one), leases end, and until the next renewal (a third of a lease) others may hold permits,
// too: the fencing number tells the resource.
//
// A *redis.Client with ContextTimeoutEnabled makes a lone caller faster: while nobody else is under way, it asks Redis in its own
// goroutine. If its context is cancelled meanwhile, it returns when Redis has answered, or after the timeout ([WithTimeout]).
//
// Redis 6 or later; the commands in the scripts are TIME and those of hashes and sorted sets, DEL, PUBLISH and PEXPIRE; they use
// the library struct.
func NewRedis(client RedisClient, name string, permits int, opts ...Option) (*Semaphore, error) {
	s := &Semaphore{name: name}
	o, err := s.options(permits, opts)
	if err != nil {
		return nil, err
	}
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, s.bad("client", "nil", "a redis client")
	}
	base := o.prefix + "{" + script.EncodeName(name) + "}:"
	b := &redisBackend{client: client, channel: base + "wake:"}
	for i, part := range []string{"state", "held", "info", "queue", "procs", "idle"} {
		b.keys[i] = base + part
	}
	return New(b, name, permits, opts...)
}

type redisBackend struct {
	client  RedisClient
	keys    [6]string
	channel string
	quiet   atomic.Bool // the last answer said that lua/quiet.lua may decide
}

var (
	//go:embed lua/parse.lua
	parseSource string
	//go:embed lua/apply.lua
	applySource string
	//go:embed lua/holders.lua
	holdersSource string
	//go:embed lua/stats.lua
	statsSource string

	applyScript   = script.New(parseSource + applySource)
	holdersScript = script.New(parseSource + holdersSource)
	statsScript   = script.New(parseSource + statsSource)
)

// Apply implements Backend.
func (r *redisBackend) Apply(ctx context.Context, b *Batch) (*Report, error) {
	if r.quiet.Load() {
		report, err := r.quietly(ctx, b)
		if report != nil || err != nil {
			return report, err
		}
	}
	return b.InSteps(func(b *Batch) (*Report, bool, error) { return r.step(ctx, b) })
}

// step runs lua/apply.lua; unfinished: that is to be run again, for Enter.
func (r *redisBackend) step(ctx context.Context, b *Batch) (_ *Report, unfinished bool, _ error) {
	reply, err := applyScript.Run(ctx, r.client, len(r.keys), r.arguments(b)...)
	if err != nil {
		return nil, false, r.failed(err)
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

// arguments are those of lua/apply.lua.
func (r *redisBackend) arguments(b *Batch) []string {
	args := make([]string, 0, len(r.keys)+15+len(b.Leave)+len(b.Renew)+5*len(b.Enter))
	args = append(args, r.keys[:]...)
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

func (r *redisBackend) unexpected(reply []string) error {
	return fmt.Errorf("%w: unexpected reply %.80q", ErrCorrupt, reply)
}

// failed tells errors of the state from others.
func (r *redisBackend) failed(err error) error {
	if strings.Contains(err.Error(), "WRONGTYPE") || redis.HasErrorPrefix(err, "CORRUPT") {
		return fmt.Errorf("%w: keys %s*", ErrCorrupt, strings.TrimSuffix(r.keys[0], "state"))
	}
	return err
}

// Listen implements Backend.
func (r *redisBackend) Listen(ctx context.Context, process string, ready func(), wake func(Grant)) error {
	sub := r.client.Subscribe(ctx, r.channel+process)
	defer func() { _ = sub.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = sub.Close() }) // a read does not heed its context
	defer stop()
	for {
		message, err := sub.Receive(ctx) // after an error it connects and subscribes anew
		if ctx.Err() != nil {
			return ctx.Err()
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

// Holders implements Backend.
func (r *redisBackend) Holders(ctx context.Context) ([]Holder, error) {
	var all []Holder
	for cursor, more := "0", true; more; more = cursor != "0" {
		part, next, err := r.someHolders(ctx, cursor)
		if err != nil {
			return nil, err
		}
		all, cursor = append(all, part...), next
	}
	slices.SortFunc(all, func(a, b Holder) int { return cmp.Or(cmp.Compare(a.Fence, b.Fence), cmp.Compare(a.ID, b.ID)) })
	return slices.CompactFunc(all, func(a, b Holder) bool { return a.ID == b.ID }), nil
}

// someHolders runs lua/holders.lua.
func (r *redisBackend) someHolders(ctx context.Context, cursor string) (all []Holder, next string, _ error) {
	reply, err := holdersScript.Run(ctx, r.client, 3, append(r.keys[:3:3], cursor)...)
	if err != nil {
		return nil, "", r.failed(err)
	}
	if len(reply)%3 != 1 {
		return nil, "", r.unexpected(reply)
	}
	next = reply[0]
	for reply = reply[1:]; len(reply) > 0; reply = reply[3:] {
		fields := strings.SplitN(reply[2], " ", 5)
		var h Holder
		expires, err := strconv.ParseInt(reply[1], 10, 64)
		if err != nil || len(fields) != 5 {
			return nil, "", fmt.Errorf("%w: holder %.80q", ErrCorrupt, reply[:3])
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

// Stats implements Backend.
func (r *redisBackend) Stats(ctx context.Context) (Stats, error) {
	reply, err := statsScript.Run(ctx, r.client, 4, r.keys[:4]...)
	if err != nil {
		return Stats{}, r.failed(err)
	}
	var permits, used, waiting int64
	var s Stats
	in := &replyReader{rest: reply}
	if in.numbers(&permits, &s.Version, &used, &waiting); in.bad {
		return Stats{}, r.unexpected(reply)
	}
	s.Permits, s.Used, s.Waiting = int(permits), int(used), int(waiting)
	return s, nil
}
