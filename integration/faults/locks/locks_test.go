// Package locks tests the store that decides under a distributed lock: holders that are stopped, killed or cancelled at the worst moment,
// locks without a holder, and its use together with the script store on one bucket.
package locks

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

const holderEnv = "TOKENBUCKET_LOCKS_HOLDER"

func TestMain(m *testing.M) {
	faultlab.Main()
	worker.Main(holderEnv, hold)
	faultlab.Parallel(6)
	redistest.Main(m)
}

var background = context.Background()

// slack is for what a step takes that no figure speaks of: processes that are woken, round trips, all on a machine that may
// be busy with other things. What the machine is late by comes on top. A lock that is not released, or a call that does not end
// when it should, lasts much longer in these tests.
const slack = time.Second

// within fails the test if something took longer than it may, on a machine that is so late.
func within(t *testing.T, what string, took, most time.Duration, late *faultlab.Lateness) {
	t.Helper()
	t.Logf("this machine is up to %v late", late.Most().Round(time.Microsecond))
	faultlab.Figure(t, fmt.Sprintf("%s, of %v", what, most), took)
	require.LessOrEqual(t, took, most+slack+10*late.Most(), what)
}

// permits is what the buckets of these tests begin with. They hardly refill: a permit a day.
const permits = 1000

func open(t *testing.T, name string, store tokenbucket.Store, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	t.Helper()
	l, err := limiter(name, store, opts...)
	require.NoError(t, err)
	return l
}

func limiter(name string, store tokenbucket.Store, opts ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	return tokenbucket.NewSmoothBursty(name, 1.0/86_400, append([]tokenbucket.Option{
		tokenbucket.WithMaxPermits(permits), tokenbucket.WithInitialPermits(permits), tokenbucket.WithStore(store),
		tokenbucket.WithStoreTimeout(time.Minute), // so that it is the fence that stops a late one, not its deadline
	}, opts...)...)
}

// place is a bucket of one test on the shared server.
type place struct {
	*redis.Client
	t                  *testing.T
	Addr, Prefix, Name string
}

func newPlace(t *testing.T, server *redistest.Server) *place {
	prefix := fmt.Sprintf("%s%d:", t.Name(), rand.Uint64())
	return &place{Client: server.Client(t), t: t, Addr: server.Addr, Prefix: prefix, Name: "x"}
}

func (p *place) bucket() string { return p.Prefix + "{" + p.Name + "}" }
func (p *place) lock() string   { return p.bucket() + ":lock" }

// text is the bucket as it is stored; holder is the token of the one who holds its lock. Either may be missing.
func (p *place) text() string   { return p.Get(background, p.bucket()).Val() }
func (p *place) holder() string { return p.Get(background, p.lock()).Val() }

func (p *place) open(which string, ttl time.Duration, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
	p.t.Helper()
	return open(p.t, p.Name, faultlab.Stores[which](p.Client, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(ttl)), opts...)
}

// state is the bucket as it is stored.
func (p *place) state() (b tokenbucket.PermitBucket) {
	p.t.Helper()
	require.NoError(p.t, b.UnmarshalText([]byte(p.text())))
	return b
}

// taken fails the test unless exactly n permits were taken from the bucket.
func (p *place) taken(n int) {
	p.t.Helper()
	b := p.state()
	require.EqualValues(p.t, n+1, b.Seq, "begun, and %d taken", n)
	require.InDelta(p.t, permits-n, b.StoredPermits, 0.01)
}

// unlocked fails the test unless the lock, whatever its holder, is released within that time.
func (p *place) unlocked(most time.Duration, late *faultlab.Lateness) {
	p.t.Helper()
	began := time.Now()
	require.NoError(p.t, redistest.Poll(10*time.Second, func() error {
		if token := p.holder(); token != "" {
			return fmt.Errorf("the lock is held by %q", token)
		}
		return nil
	}))
	within(p.t, "the lock was free after", time.Since(began), most, late)
}

// step is what the lock store does with a command that it sends.
type step string

const (
	obtain  step = "obtain"
	read    step = "read"
	commit  step = "commit"
	release step = "release"
	decide  step = "decide" // the script store's
	other   step = "other"
)

// known are the library's scripts, by hash and by source.
var known = func() map[string]step {
	all := map[string]step{}
	for sc, step := range map[*script.Script]step{&redisbucket.ReadScript: read, &redisbucket.CommitScript: commit, &redisbucket.ApplyScript: decide} {
		all[sc.SHA], all[sc.Source] = step, step
	}
	return all
}()

// arguments of a command, as text.
func arguments(cmd redis.Cmder) []string {
	var all []string
	for _, a := range cmd.Args() {
		if p, ok := a.(*string); ok {
			a = *p
		}
		all = append(all, fmt.Sprint(a))
	}
	return all
}

// newState is the index of the new state in the arguments of a commit; a release writes nothing.
const newState = 3 + 2 + 5

// stepOf returns the purpose of a command.
func stepOf(args []string) step {
	if len(args) < 4 || args[0] != "evalsha" && args[0] != "eval" {
		return other
	}
	s, ok := known[args[1]]
	switch {
	case !ok && args[2] == "1" && len(args) == 7: // a lock, its token, the token's length, a time to live
		return obtain
	case !ok:
		return other
	case s == commit && args[newState] == "":
		return release
	}
	return s
}

// tapped is a client that does something before a command is sent, and when its reply is there. NOSCRIPT is no reply: the
// command is about to be sent again. The store asks once, in a goroutine of its own, whether the server evicts: that command is only noted.
type tapped struct {
	tokenbucket.RedisClient
	before   func(step, []string)
	after    func(step, redis.Cmder)
	reviewed atomic.Bool
}

func (c *tapped) Process(ctx context.Context, cmd redis.Cmder) error {
	if cmd.Name() == "info" {
		defer c.reviewed.Store(true)
		return c.RedisClient.Process(ctx, cmd)
	}
	args := arguments(cmd)
	s := stepOf(args)
	if c.before != nil {
		c.before(s, args)
	}
	err := c.RedisClient.Process(ctx, cmd)
	if c.after != nil && !redis.HasErrorPrefix(err, "NOSCRIPT") {
		c.after(s, cmd)
	}
	return err
}

// answer is the first word of a script's reply: of a read "held" or "lost", of a commit "done", "lost", "late" or "changed".
func answer(cmd redis.Cmder) string {
	if c, ok := cmd.(script.Call); ok && len(c.Val()) > 0 {
		return c.Val()[0]
	}
	return ""
}

// awaitStop returns when a process that stops itself stands still.
func awaitStop(t *testing.T, pid int) {
	t.Helper()
	require.NoError(t, redistest.Poll(30*time.Second, func() error { return faultlab.Stopped(pid) }))
}

// stopSelf stops the calling process until a signal continues it. It returns then.
func stopSelf() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	time.Sleep(20 * time.Millisecond) // the kernel takes a moment to stop every thread, and this one must not run on meanwhile
}
