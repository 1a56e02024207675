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

// background is the context of every measured call. It is never cancelled, so no rival has to watch it.
var background = context.Background()

// limiter is the interface through which all rivals are measured: one permit from one of many buckets, without waiting.
type limiter interface {
	Take(key int) (granted bool, err error)
}

// limit is the limit of each bucket, for every rival.
type limit struct {
	Rate  float64 // permits a second
	Burst int64
	// Start is the number of initial permits of a bucket of this library; 0 means a full bucket. A bucket that cannot overflow can be audited
	// exactly. The rivals start full.
	Start int64
}

// unlimited grants every call of a benchmark, but still counts it.
var unlimited = limit{Rate: 1e6, Burst: 2e12, Start: 1e12}

// exhausted is one permit an hour: after the first call, all calls are refused.
var exhausted = limit{Rate: 1. / 3600, Burst: 1}

// every returns the time between two permits.
func (l limit) every() time.Duration { return time.Duration(float64(time.Second) / l.Rate) }

// window returns the time in which a burst accrues, for rivals that count in windows.
func (l limit) window() time.Duration {
	return time.Duration(float64(l.Burst) / l.Rate * float64(time.Second))
}

// Names of the rivals in the tables.
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

// rival is a rate limiter to compare.
type rival struct {
	name string
	// redis reports whether its buckets are in Redis.
	redis bool
	// refuses reports whether it can refuse a call. Rivals that make callers wait, or limit nothing, cannot.
	refuses bool
	// open returns a limiter of the named buckets. It accesses none of them.
	open func(c *clients, names []string, l limit) (limiter, error)
}

// rivals lists all rivals, this library's stores first.
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

// such returns the names of the rivals for which want returns true.
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

// bucketNames returns names of equal length, so that no bucket costs more than another.
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
	// exact reports whether the buckets' accounts show each permit, because the process prefetches none.
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

// leaseTime is the prefetch period of the benchmark, if it covers at least two permits.
const leaseTime = 100 * time.Millisecond

func openLease(c *clients, names []string, l limit) (limiter, error) {
	t, err := newTokenBuckets(tokenbucket.NewRedisScriptStore(c.plain), names, l, tokenbucket.WithPrefetch(max(leaseTime, 2*l.every())))
	if err != nil {
		return nil, err
	}
	t.exact = false // prefetched permits that are not granted yet are missing from the bucket
	return t, nil
}

// taker is a function that implements limiter.
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
	// This rival uses compare-and-swap, and by default gives up after ten attempts: too few for hundreds of callers of one key.
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

// openUber opens limiters that have no burst and never refuse. For a workload without waits they need a rate that no caller reaches.
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

// openPing limits nothing: it measures the lower bound, one round trip.
func openPing(c *clients, _ []string, _ limit) (limiter, error) {
	return taker(func(int) (bool, error) {
		err := c.plain.Ping(background).Err()
		return err == nil, err
	}), nil
}

// connections bounds the connections of each client. With more, calls only queue in the server instead of in the client.
const connections = 64

// clients are the connections that the rivals share.
type clients struct {
	plain      *redis.Client
	pipelining *redis.AutoPipeliner // with go-redis' default settings, best for few callers
	waiting    *redis.AutoPipeliner // with settings that were found best for hundreds of callers
	pool       *redigo.Pool

	opened []*redis.Client
}

// connect creates the clients. Each opens its connections on first use.
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
	// Waiting for a connection is not an error here.
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
