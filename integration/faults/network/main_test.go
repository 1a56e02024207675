// Package network tests the token bucket against what a network and a server that hangs do to it: replies that are lost,
// connections that are cut, delays, silence, refusal. With the lock store and the script store, with a client as it comes
// and with one whose options are strict.
package network

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var background = context.Background()

func TestMain(m *testing.M) {
	faultlab.Parallel(12)
	redistest.Main(m)
}

const prefix = "tokenbucket:"

// stores to test; clients too.
var (
	stores  = []string{"script", "lock"}
	clients = map[string]func(*redis.Options){
		"default": func(*redis.Options) {},
		"strict": func(o *redis.Options) {
			o.MaxRetries, o.DialerRetries, o.ContextTimeoutEnabled = -1, 1, true
			o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 500*time.Millisecond, 5*time.Second, 5*time.Second
		},
		// Loses patience sooner than its callers do, and would try again: for tests that ask for it.
		"hasty": func(o *redis.Options) { o.ReadTimeout = 300 * time.Millisecond },
	}
	usual = []string{"default", "strict"}
)

// bench is a server with a proxy before it, and one kind of store and client.
type bench struct {
	server *redistest.Server
	proxy  *faultlab.Proxy
	direct *redis.Client // past the proxy
	which  string        // store
	client string
}

// each runs a test with every store, the usual clients and more, at the same time as others. Main looks for goroutines that are left.
func each(t *testing.T, test func(t *testing.T, b *bench), more ...string) {
	t.Helper()
	t.Parallel()
	benches(t, test, more...)
}

// sideBySide is each beside no other test, and looks for goroutines that are left itself.
func sideBySide(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	noLeaks(t)
	benches(t, test)
}

func benches(t *testing.T, test func(t *testing.T, b *bench), more ...string) {
	t.Helper()
	for _, which := range stores {
		for _, client := range append(more, usual...) {
			t.Run(which+"/"+client, func(t *testing.T) {
				t.Parallel()
				test(t, open(t, which, client))
			})
		}
	}
}

// inTurn is each with the usual clients, one after another, and looks for goroutines that are left.
func inTurn(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	for _, which := range stores {
		for _, client := range usual {
			t.Run(which+"/"+client, func(t *testing.T) {
				noLeaks(t)
				test(t, open(t, which, client))
			})
		}
	}
}

func open(t *testing.T, which, client string) *bench {
	t.Helper()
	b := &bench{server: redistest.Start(t), which: which, client: client}
	b.proxy, b.direct = faultlab.StartProxy(t, b.server.Addr), b.server.Client(t)
	t.Cleanup(func() { faultlab.CleanUp(t, b.direct, prefix) })
	return b
}

// noLeaks fails the test if goroutines outlive it. A client as it comes waits five seconds for a reply.
func noLeaks(t *testing.T) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		if err := redistest.Poll(15*time.Second, func() error { return goleak.Find(before) }); err != nil {
			t.Error(err)
		}
	})
}

// connect is another client of the bench's kind, through the proxy.
func (b *bench) connect(t *testing.T, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	own := clients[b.client]
	through := func(o *redis.Options) { o.Addr = b.proxy.Addr }
	return b.server.Client(t, append([]func(*redis.Options){own, through}, change...)...)
}

// limiter is a bucket named as the test, on a store of its own.
func (b *bench) limiter(
	t *testing.T, client tokenbucket.RedisClient, rate, size float64, timeout time.Duration, more ...tokenbucket.Option,
) *tokenbucket.RateLimiter {
	t.Helper()
	return limiter(t, faultlab.Stores[b.which](client), rate, size, timeout, more...)
}

func limiter(
	t *testing.T, store tokenbucket.Store, rate, size float64, timeout time.Duration, more ...tokenbucket.Option,
) *tokenbucket.RateLimiter {
	t.Helper()
	l, err := tokenbucket.NewSmoothBursty("bucket", rate, append(more, tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(size),
		tokenbucket.WithInitialPermits(size), tokenbucket.WithStoreTimeout(timeout))...)
	require.NoError(t, err)
	return l
}

// state is the bucket as the server has it. A limiter of the same configuration reads it.
func state(t *testing.T, client tokenbucket.RedisClient, rate, size float64) tokenbucket.PermitBucket {
	t.Helper()
	var s tokenbucket.PermitBucket
	require.NoError(t, redistest.Poll(10*time.Second, func() (err error) {
		s, err = limiter(t, tokenbucket.NewRedisScriptStore(client), rate, size, 5*time.Second).State(background)
		return err
	}))
	return s
}

// slow is the rate of a bucket in which next to nothing accrues while a test runs: the permits that it lacks were taken.
const slow = 0.001

// taken is how many permits a bucket at the slow rate lacks, or owes.
func taken(s tokenbucket.PermitBucket, size float64) int {
	owed := max(0, float64(s.NextFreeTicketMicros-s.SeenMicros)) / s.IntervalMicros
	return int(math.Round(size - s.StoredPermits + owed))
}

// takes is a text that those requests contain that take permits, of a store; of the script store, all do.
func (b *bench) takes() string {
	if b.which == "lock" {
		return "tb1 epoch=" // a new state: the commit
	}
	return "evalsha"
}

// refunds is a text that those requests contain that give permits back, unless several share a request.
func (b *bench) refunds() string {
	if b.which == "lock" {
		return b.takes()
	}
	return "\nG "
}

// failure fails the test unless an error is one that a store which does not answer may cause.
func failure(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, tokenbucket.ErrStoreTimeout) && !errors.Is(err, tokenbucket.ErrStoreUnavailable) &&
		!errors.Is(err, tokenbucket.ErrPoolExhausted) &&
		!errors.Is(err, tokenbucket.ErrLockNotObtained) && !errors.Is(err, context.DeadlineExceeded) && !network(err) {
		t.Errorf("unexpected: %v", err)
	}
}

// network reports whether an error is the network's own.
func network(err error) bool {
	if err == nil {
		return false
	}
	text := err.Error()
	for _, s := range []string{"EOF", "connection re", "broken pipe", "i/o timeout", "closed network", "bad connection"} {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

// outcomes counts what calls came to, in permits.
type outcomes struct {
	sent, received, failed, unsent atomic.Int64
	served                         atomic.Int64 // calls that received
	answered                       atomic.Int64 // requests, of which a call may have made several, see count
}

// count is an option for the limiter that the calls use: it counts the requests that the store decides. A caller that gets its permit, or
// is woken, more than 100 ms after the due time lets it lapse and asks for another. So on a slow machine there are more replies than calls
// that received something.
func (o *outcomes) count() tokenbucket.Option {
	return tokenbucket.WithObserver(tokenbucket.Observer{Trip: func(t tokenbucket.Trip) {
		if t.Err == nil {
			o.answered.Add(int64(t.Requests))
		}
	}})
}

// most returns how many permits may have been taken if nothing was executed twice: those of all calls, of which none was for more than
// each, and those that were requested once more.
func (o *outcomes) most(each int64) int64 { return o.sent.Load() + o.again(each) }

// again is how many permits they may have asked for once more.
func (o *outcomes) again(each int64) int64 { return each * max(0, o.answered.Load()-o.served.Load()) }

// call is one TryAcquire without waiting. Those that were not sent, since the store had just failed, are counted apart.
func (o *outcomes) call(t *testing.T, ctx context.Context, l *tokenbucket.RateLimiter, n int) error {
	t.Helper()
	ok, err := l.TryAcquire(ctx, n, 0)
	var met interface{ StoreFailure() error } // it was sent, and has met the failure itself
	switch {
	case errors.Is(err, tokenbucket.ErrStoreUnavailable) && !errors.As(err, &met):
		o.unsent.Add(int64(n))
		time.Sleep(10 * time.Millisecond)
		return err
	case err != nil:
		failure(t, err)
		o.failed.Add(int64(n))
	case ok:
		o.received.Add(int64(n))
		o.served.Add(1)
	default:
		t.Error("refused")
	}
	o.sent.Add(int64(n))
	return err
}

// warm makes calls until thirty were granted: the server's clock is known then, and that the bucket works.
func (o *outcomes) warm(t *testing.T, l *tokenbucket.RateLimiter) {
	t.Helper()
	for began := time.Now(); o.received.Load() < 30; {
		if err := o.call(t, background, l, 1); err != nil && time.Since(began) > time.Minute {
			t.Fatal(err)
		}
	}
}

// disturb lets another process take a permit, and l find that out: it computes nothing beforehand for its next batch then, so
// that the server decides it whenever it arrives.
func (b *bench) disturb(t *testing.T, o *outcomes, l *tokenbucket.RateLimiter) {
	t.Helper()
	_ = o.call(t, background, limiter(t, faultlab.Stores["script"](b.direct), slow, size, 5*time.Second, o.count()), 1)
	_ = o.call(t, background, l, 1)
}

func (o *outcomes) String() string {
	return fmt.Sprintf("sent %d, received %d, failed %d, not sent %d; asked again %d times",
		o.sent.Load(), o.received.Load(), o.failed.Load(), o.unsent.Load(), o.again(1))
}
