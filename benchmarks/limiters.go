package main

import (
	"context"
	"fmt"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/go-tokenbucket/tokenbucket"
	redigo "github.com/gomodule/redigo/redis"
	"github.com/redis/go-redis/v9"
	sethvargo "github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-redisstore"
	"github.com/throttled/throttled/v2"
	throttledstore "github.com/throttled/throttled/v2/store/goredisstore.v9"
	ulule "github.com/ulule/limiter/v3"
	ululestore "github.com/ulule/limiter/v3/drivers/store/redis"
	uber "go.uber.org/ratelimit"
	xrate "golang.org/x/time/rate"
)

// background is the context of every measured call: none of the rivals has to watch for its end.
var background = context.Background()

// limiter is what all rivals are measured by: one permit from one of many buckets, now or never.
type limiter interface {
	Take(key int) (granted bool, err error)
}

// limit is what every rival is asked to enforce on each bucket.
type limit struct {
	Rate  float64 // permits a second
	Burst int64
	// Start is what a bucket of this library holds at the beginning, if not all of the burst: a bucket that cannot
	// overflow can be audited to the permit. The rivals start full.
	Start int64
}

// unlimited grants whatever a benchmark can ask for, and is still counted.
var unlimited = limit{Rate: 1e6, Burst: 2e12, Start: 1e12}

// exhausted is one permit an hour: once that is gone, everything is refused.
var exhausted = limit{Rate: 1. / 3600, Burst: 1}

// every is the time between two permits.
func (l limit) every() time.Duration { return time.Duration(float64(time.Second) / l.Rate) }

// window is the time in which a burst accrues, for rivals that count in windows.
func (l limit) window() time.Duration {
	return time.Duration(float64(l.Burst) / l.Rate * float64(time.Second))
}

// The rivals' names, as the tables show them.
const (
	memoryStore   = "memory store"
	lockStore     = "lock store"
	scriptStore   = "script store"
	leaseStore    = "script store, lease"
	redisRate     = "redis_rate"
	redisRatePipe = "redis_rate, auto-pipelining"
	redisRateWait = "redis_rate, pipelining 100 µs"
	throttledName = "throttled"
	ululeName     = "ulule/limiter"
	redisStore    = "go-redisstore"
	xTimeRate     = "x/time/rate"
	uberRatelimit = "uber ratelimit"
	ping          = "PING"
)

// rival is one way to limit a rate.
type rival struct {
	name string
	// redis: its buckets are in Redis.
	redis bool
	// refuses: false for those that let callers wait, or that limit nothing.
	refuses bool
	// open returns a limiter of the named buckets. It touches none of them.
	open func(c *clients, names []string, l limit) (limiter, error)
}

// rivals are all that are compared, this library's stores first.
var rivals = []rival{
	{memoryStore, false, true, openMemoryStore},
	{lockStore, true, true, openLockStore},
	{scriptStore, true, true, openScriptStore},
	{leaseStore, true, true, openLease},
	{redisRate, true, true, openRedisRate},
	{redisRatePipe, true, true, openRedisRatePipelining},
	{redisRateWait, true, true, openRedisRateWaiting},
	{throttledName, true, true, openThrottled},
	{ululeName, true, true, openUlule},
	{redisStore, true, true, openRedisStore},
	{xTimeRate, false, true, openXTimeRate},
	{uberRatelimit, false, false, openUber},
	{ping, true, false, openPing},
}

// named returns rivals in the order of the list.
func named(names ...string) []rival {
	var found []rival
	for _, r := range rivals {
		for _, name := range names {
			if r.name == name {
				found = append(found, r)
			}
		}
	}
	return found
}

// such returns the names of rivals of a kind.
func such(want func(rival) bool) []string {
	var names []string
	for _, r := range rivals {
		if want(r) {
			names = append(names, r.name)
		}
	}
	return names
}

func onRedis(r rival) bool { return r.redis && r.name != leaseStore }

// bucketNames are of equal length, so that no bucket is dearer than another.
func bucketNames(prefix string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s%07d", prefix, i)
	}
	return names
}

// tokenBuckets are buckets of this library.
type tokenBuckets struct {
	limiters []*tokenbucket.RateLimiter
	limit    limit
	// exact: nothing is held back in the process, so that the buckets' accounts show each permit.
	exact bool
}

func newTokenBuckets(store tokenbucket.Store, names []string, l limit, opts ...tokenbucket.Option) (*tokenBuckets, error) {
	start := l.Start
	if start == 0 {
		start = l.Burst
	}
	opts = append(opts, tokenbucket.WithStore(store),
		tokenbucket.WithMaxPermits(float64(l.Burst)), tokenbucket.WithInitialPermits(float64(start)))
	t := &tokenBuckets{limiters: make([]*tokenbucket.RateLimiter, len(names)), limit: l, exact: true}
	for i, name := range names {
		var err error
		if t.limiters[i], err = tokenbucket.NewSmoothBursty(name, l.Rate, opts...); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Take implements limiter.
func (t *tokenBuckets) Take(key int) (bool, error) {
	return t.limiters[key].TryAcquire(background, 1, 0)
}

func openMemoryStore(_ *clients, names []string, l limit) (limiter, error) {
	return newTokenBuckets(tokenbucket.NewMemoryStore(), names, l)
}

func openLockStore(c *clients, names []string, l limit) (limiter, error) {
	return newTokenBuckets(tokenbucket.NewRedisStore(c.plain), names, l)
}

func openScriptStore(c *clients, names []string, l limit) (limiter, error) {
	return newTokenBuckets(tokenbucket.NewRedisScriptStore(c.plain), names, l)
}

// leaseTime is how long the benchmark's leases last, if that is two permits' worth.
const leaseTime = 100 * time.Millisecond

func openLease(c *clients, names []string, l limit) (limiter, error) {
	t, err := newTokenBuckets(tokenbucket.NewRedisScriptStore(c.plain), names, l, tokenbucket.WithLease(max(leaseTime, 2*l.every())))
	if err != nil {
		return nil, err
	}
	t.exact = false // what is leased and not yet handed out is missing from the bucket
	return t, nil
}

// taker makes a limiter of a function.
type taker func(key int) (bool, error)

// Take implements limiter.
func (t taker) Take(key int) (bool, error) { return t(key) }

func openRedisRate(c *clients, names []string, l limit) (limiter, error) {
	return allow(redis_rate.NewLimiter(c.plain), names, l), nil
}

func openRedisRatePipelining(c *clients, names []string, l limit) (limiter, error) {
	return allow(redis_rate.NewLimiter(c.pipelining), names, l), nil
}

func openRedisRateWaiting(c *clients, names []string, l limit) (limiter, error) {
	return allow(redis_rate.NewLimiter(c.waiting), names, l), nil
}

func allow(r *redis_rate.Limiter, names []string, l limit) taker {
	asked := redis_rate.Limit{Rate: int(l.Rate), Burst: int(l.Burst), Period: time.Second}
	if l.Rate < 1 {
		asked.Rate, asked.Period = 1, l.every()
	}
	return func(key int) (bool, error) {
		result, err := r.Allow(background, names[key], asked)
		return err == nil && result.Allowed > 0, err
	}
}

func openThrottled(c *clients, names []string, l limit) (limiter, error) {
	store, err := throttledstore.NewCtx(c.plain, "throttled:")
	if err != nil {
		return nil, err
	}
	quota := throttled.RateQuota{MaxRate: throttled.PerDuration(1, l.every()), MaxBurst: int(l.Burst) - 1}
	r, err := throttled.NewGCRARateLimiterCtx(store, quota)
	if err != nil {
		return nil, err
	}
	// It compares and swaps, and by default gives up after ten attempts: too few for hundreds of callers of one key.
	r.SetMaxCASAttemptsLimit(1 << 20)
	return taker(func(key int) (bool, error) {
		limited, _, err := r.RateLimitCtx(background, names[key], 1)
		return err == nil && !limited, err
	}), nil
}

func openUlule(c *clients, names []string, l limit) (limiter, error) {
	store, err := ululestore.NewStore(c.plain)
	if err != nil {
		return nil, err
	}
	r := ulule.New(store, ulule.Rate{Period: l.window(), Limit: l.Burst})
	return taker(func(key int) (bool, error) {
		result, err := r.Get(background, names[key])
		return err == nil && !result.Reached, err
	}), nil
}

func openRedisStore(c *clients, names []string, l limit) (limiter, error) {
	var store sethvargo.Store
	store, err := redisstore.NewWithPool(&redisstore.Config{Tokens: uint64(l.Burst), Interval: l.window()}, c.pool)
	if err != nil {
		return nil, err
	}
	return taker(func(key int) (bool, error) {
		_, _, _, ok, err := store.Take(background, names[key])
		return ok, err
	}), nil
}

func openXTimeRate(_ *clients, names []string, l limit) (limiter, error) {
	limiters := make([]*xrate.Limiter, len(names))
	for i := range limiters {
		limiters[i] = xrate.NewLimiter(xrate.Limit(l.Rate), int(l.Burst))
	}
	return taker(func(key int) (bool, error) { return limiters[key].Allow(), nil }), nil
}

// openUber opens limiters that have no burst and never refuse: where nothing is to be waited for, they need a rate that
// nobody reaches.
func openUber(_ *clients, names []string, l limit) (limiter, error) {
	per := l.every()
	if l.Burst >= unlimited.Burst {
		per = time.Nanosecond
	}
	limiters := make([]uber.Limiter, len(names))
	for i := range limiters {
		limiters[i] = uber.New(1, uber.Per(per), uber.WithSlack(int(min(l.Burst, 1e6))))
	}
	return taker(func(key int) (bool, error) {
		limiters[key].Take()
		return true, nil
	}), nil
}

// openPing limits nothing: it is the floor of a round trip.
func openPing(c *clients, _ []string, _ limit) (limiter, error) {
	return taker(func(int) (bool, error) {
		err := c.plain.Ping(background).Err()
		return err == nil, err
	}), nil
}

// connections is how many each client may open. More do not help: they only queue up in the server instead of here.
const connections = 64

// clients are the connections that the rivals share.
type clients struct {
	plain      *redis.Client
	pipelining *redis.AutoPipeliner // with go-redis' own settings, the best for few callers
	waiting    *redis.AutoPipeliner // with those that were found best for hundreds of callers
	pool       *redigo.Pool

	opened []*redis.Client
}

// connect prepares the clients. None opens a connection before it is used.
func connect(addr string) (*clients, error) {
	c := &clients{pool: &redigo.Pool{
		MaxActive: connections, MaxIdle: connections, Wait: true,
		Dial: func() (redigo.Conn, error) { return redigo.Dial("tcp", addr) },
	}}
	c.plain = c.open(addr)
	var err error
	if c.pipelining, err = c.open(addr).AutoPipeline(); err != nil {
		return nil, err
	}
	c.waiting, err = c.open(addr).AutoPipelineWithOptions(&redis.AutoPipelineOptions{
		MaxBatchSize: 300, MaxConcurrentBatches: 4, Unordered: true, MaxFlushDelay: 100 * time.Microsecond, AdaptiveDelay: true,
	})
	return c, err
}

func (c *clients) open(addr string) *redis.Client {
	// To queue for a connection is not an error here.
	client := redis.NewClient(&redis.Options{Addr: addr, PoolSize: connections, PoolTimeout: time.Minute})
	c.opened = append(c.opened, client)
	return client
}

func (c *clients) close() {
	_ = c.pipelining.Close()
	_ = c.waiting.Close()
	for _, client := range c.opened {
		_ = client.Close()
	}
	_ = c.pool.Close()
}
