package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// sampled is the number of buckets that are called, spread evenly over all. They exceed a processor's nearest caches, but are few enough that
// the memory of this process does not grow with that of Redis.
const sampled = 20_000

// expiryLimit bounds the time that Redis takes to expire all keys.
const expiryLimit = time.Minute

// keyPrefix makes this library's keys as long as those of redis_rate, which begin with "rate:".
const keyPrefix = "rate"

// crowd is a redis-server with very many buckets.
type crowd struct {
	*bench
	server *redistest.Server
	opened []*redis.Client
	empty  int64 // used_memory before the last database was filled
}

// manyBuckets measures the memory of a bucket in Redis and the time of a call beside many other buckets. It checks that all buckets expire.
func manyBuckets(b *bench, o *outcome) error {
	server, err := redistest.StartMain() // a server of its own, which holds only the buckets
	if err != nil {
		return err
	}
	defer server.Close()
	c := &crowd{bench: b, server: server}
	defer c.close()
	for _, step := range []func(*outcome) error{c.memory, c.times, c.expiry} {
		if err := step(o); err != nil {
			return err
		}
	}
	return nil
}

// client returns a client of one database of the server. Each database has its own key table.
func (c *crowd) client(db int) *redis.Client {
	client := redis.NewClient(&redis.Options{Addr: c.server.Addr, DB: db, PoolSize: connections, PoolTimeout: time.Minute})
	c.opened = append(c.opened, client)
	return client
}

func (c *crowd) close() {
	for _, client := range c.opened {
		_ = client.Close() // some are closed already
	}
}

// memory compares the memory of a bucket in Redis with that of a redis_rate key of the same length and limit.
func (c *crowd) memory(o *outcome) error {
	l := limit{Rate: 5, Burst: 100}
	client := c.client(0)
	defer client.Close()
	ours := func(name string) (limiter, error) {
		return newTokenBuckets(tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(keyPrefix)), []string{name}, l)
	}
	theirs := func(name string) (limiter, error) {
		return allow(redis_rate.NewLimiter(client), []string{name}, l), nil
	}
	mine, length, err := c.bytes(client, "u%07d", ours, tokenBucketKey)
	if err != nil {
		return err
	}
	other, same, err := c.bytes(client, "u:%07d", theirs, func(name string) string { return "rate:" + name })
	if err != nil {
		return err
	}
	if length != same {
		return fmt.Errorf("keys of %d and %d bytes are compared: want the same", length, same)
	}
	o.targets = append(o.targets, target{what: "memory in Redis a bucket", value: mine / other, limit: 2, unit: "× redis_rate"})
	o.notes = append(o.notes, fmt.Sprintf("Redis holds a bucket in %.0f bytes, redis_rate's in %.0f, with keys of %d bytes (used_memory over %d buckets)",
		mine, other, length, c.buckets))
	return nil
}

func tokenBucketKey(name string) string { return keyPrefix + "{" + name + "}" }

// bytes returns the mean memory of many buckets, and the length of their keys.
func (c *crowd) bytes(client *redis.Client, format string, open func(string) (limiter, error), key func(string) string) (float64, int, error) {
	before, err := usedMemory(c.ctx, client)
	if err != nil {
		return 0, 0, err
	}
	name := func(i int) string { return fmt.Sprintf(format, i) }
	l, err := open(name(0))
	if err != nil {
		return 0, 0, err
	}
	for range 3 { // so that the state has a typical number of digits
		if err := mustGrant(l); err != nil {
			return 0, 0, err
		}
	}
	if err := c.multiply(0, c.buckets, func(i int) string { return key(name(i)) }); err != nil {
		return 0, 0, err
	}
	after, err := usedMemory(c.ctx, client)
	if err != nil {
		return 0, 0, err
	}
	if err := client.FlushDB(c.ctx).Err(); err != nil {
		return 0, 0, err
	}
	return float64(after-before) / float64(c.buckets), len(key(name(0))), nil
}

func mustGrant(l limiter) error {
	granted, err := l.Take(0)
	if err == nil && !granted {
		err = errors.New("a fresh bucket refuses its first permits")
	}
	return err
}

// multiply copies the state of bucket 0, which must exist, to n−1 others. It checks that the copies exist, are no smaller and have an expiry.
func (c *crowd) multiply(db, n int, key func(int) string) error {
	client := c.client(db) // a client of its own, whose buffers are freed before memory is measured
	defer client.Close()
	state, err := client.Get(c.ctx, key(0)).Result()
	if err != nil {
		return err
	}
	err = c.pipeline(client, n, "bucket", func(p redis.Pipeliner, i int) {
		if i > 0 {
			p.Set(c.ctx, key(i), state, 24*time.Hour)
		}
	})
	if err != nil {
		return err
	}
	original, err := client.MemoryUsage(c.ctx, key(0)).Result()
	if err != nil {
		return err
	}
	copied, err := client.MemoryUsage(c.ctx, key(n-1)).Result()
	if err != nil {
		return err
	}
	if copied != original {
		return fmt.Errorf("a copy takes %d bytes, the bucket itself %d", copied, original)
	}
	return c.checkKeys(client, db, n)
}

// pipeline calls add for each number below n, and sends a thousand commands in each round trip.
func (c *crowd) pipeline(client *redis.Client, n int, what string, add func(redis.Pipeliner, int)) error {
	const batch = 1000
	for i := 0; i < n; i += batch {
		p := client.Pipeline()
		for j := i; j < min(i+batch, n); j++ {
			add(p, j)
		}
		if p.Len() > 0 {
			if _, err := p.Exec(c.ctx); err != nil {
				return err
			}
		}
		c.progress.step("%s %d of %d", what, i, n)
	}
	return nil
}

var keyspace = regexp.MustCompile(`(?m)^db(\d+):keys=(\d+),expires=(\d+)`)

// checkKeys checks that the database has n keys, each with an expiry.
func (c *crowd) checkKeys(client *redis.Client, db, n int) error {
	info, err := client.Info(c.ctx, "keyspace").Result()
	if err != nil {
		return err
	}
	want := strconv.Itoa(n)
	for _, m := range keyspace.FindAllStringSubmatch(info, -1) {
		if m[1] == strconv.Itoa(db) {
			if m[2] != want || m[3] != want {
				return fmt.Errorf("%s keys, %s of them with a time to live: want %d", m[2], m[3], n)
			}
			return nil
		}
	}
	return fmt.Errorf("no keys: want %d", n)
}

var usedMemoryLine = regexp.MustCompile(`(?m)^used_memory:(\d+)`)

func usedMemory(ctx context.Context, client *redis.Client) (int64, error) {
	info, err := client.Info(ctx, "memory").Result()
	if err != nil {
		return 0, err
	}
	m := usedMemoryLine.FindStringSubmatch(info)
	if m == nil {
		return 0, fmt.Errorf("INFO memory without used_memory: %q", info)
	}
	return strconv.ParseInt(m[1], 10, 64)
}

// sizes returns the numbers of buckets to measure. Each number uses a database of its own.
func (c *crowd) sizes() []int {
	return slices.Compact([]int{1, 1000, max(1000, c.buckets/10), c.buckets})
}

func crowdName(i int) string { return fmt.Sprintf("t%07d", i) }

// times measures the calls of one caller beside increasing numbers of buckets.
func (c *crowd) times(o *outcome) error {
	var cs []*contender
	for db, n := range c.sizes() {
		crowded, err := c.settleIn(db, n)
		if err != nil {
			return err
		}
		cs = append(cs, crowded)
	}
	under := func(ct *contender) load {
		return load{Callers: 1, Keys: len(ct.limiter.(*tokenBuckets).limiters), Duration: c.duration}
	}
	var total []counts
	for range cs {
		total = append(total, counts{})
	}
	// The time of a single caller depends on the core that the server runs on. More rounds average that out.
	err := c.alternate(cs, 3*c.rounds, under, func(ct *contender, n counts) { total[slices.Index(cs, ct)].add(&n) })
	if err != nil {
		return err
	}
	for i, ct := range cs {
		ct.settle(total[i], allGranted)
		f := ct.figure()
		o.figures = append(o.figures, f)
		o.violate(f.wrong)
	}
	first, last := o.figures[0], o.figures[len(o.figures)-1]
	o.base = first.rival
	o.targets = append(o.targets, target{
		what: fmt.Sprintf("%s, %s: time", scriptStore, last.rival), value: last.nanos / first.nanos, limit: 1.15, unit: "× " + first.rival,
	})
	return nil
}

// settleIn fills a database and opens the sample of buckets that is called.
func (c *crowd) settleIn(db, n int) (*contender, error) {
	name := fmt.Sprintf("%d buckets", n)
	if n == 1 {
		name = "1 bucket"
	}
	client := c.client(db)
	store := tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(keyPrefix))
	names := make([]string, min(n, sampled))
	for i := range names {
		names[i] = crowdName(i * (n / len(names)))
	}
	t, err := newTokenBuckets(store, names, unlimited)
	if err != nil {
		return nil, err
	}
	if err := mustGrant(t); err != nil {
		return nil, err
	}
	if c.empty, err = usedMemory(c.ctx, client); err != nil {
		return nil, err
	}
	if err := c.multiply(db, n, func(i int) string { return tokenBucketKey(crowdName(i)) }); err != nil {
		return nil, err
	}
	ct := &contender{rival: rival{name: name, redis: true, refuses: true}, limiter: t}
	ct.account, err = openAccount(t)
	return ct, err
}

// expiry expires all buckets, and waits until Redis has freed their memory.
func (c *crowd) expiry(o *outcome) error {
	sizes := c.sizes()
	db, n := len(sizes)-1, c.buckets
	client := c.client(db)
	defer client.Close()
	if err := c.checkKeys(client, db, n); err != nil { // the sampled buckets have been written again
		o.violate(err)
	}
	full, err := usedMemory(c.ctx, client)
	if err != nil {
		return err
	}
	err = c.pipeline(client, n, "expiry of bucket", func(p redis.Pipeliner, i int) {
		p.PExpire(c.ctx, tokenBucketKey(crowdName(i)), time.Second)
	})
	if err != nil {
		return err
	}
	began := time.Now()
	left := func() error { return c.gone(client) }
	if err := redistest.Poll(expiryLimit, left); err != nil {
		o.violate(err)
	}
	o.notes = append(o.notes, fmt.Sprintf("every bucket had a time to live; %d of them expired within %s of being told to in 1 s",
		n, time.Since(began).Round(100*time.Millisecond)))
	return c.memoryBack(o, client, full)
}

func (c *crowd) gone(client *redis.Client) error {
	n, err := client.DBSize(c.ctx).Result()
	if err == nil && n > 0 {
		err = fmt.Errorf("%d buckets are left after their time to live", n)
	}
	c.progress.step("%d buckets left", n)
	return err
}

// memoryBack waits until the server's memory is back to that before the last database was filled. Redis takes a moment to shrink its tables.
func (c *crowd) memoryBack(o *outcome, client *redis.Client, full int64) error {
	const enough = 0.95
	share := math.NaN()
	err := redistest.Poll(expiryLimit, func() error {
		now, err := usedMemory(c.ctx, client)
		if err != nil {
			return err
		}
		if share = float64(full-now) / float64(full-c.empty); share < enough {
			return fmt.Errorf("only %.3f of the memory is back", share)
		}
		return nil
	})
	o.targets = append(o.targets, target{what: "memory back after expiry", value: share, limit: enough, atLeast: true, unit: "of what they took"})
	if math.IsNaN(share) {
		return err
	}
	return nil
}
