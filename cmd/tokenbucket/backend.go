package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/go-tokenbucket/tokenbucket"
	"github.com/redis/go-redis/v9"
)

// backend is the storage of the demo's bucket.
type backend struct {
	about    string
	newStore func() tokenbucket.Store // called once for each gateway
	prefix   string                   // prefix of the keys
	connect  func() *redis.Client     // nil for --store memory
	closers  []func()
}

func (b *backend) onClose(f func()) { b.closers = append(b.closers, f) }

// close runs the closers, the last one first.
func (b *backend) close() {
	for i := len(b.closers) - 1; i >= 0; i-- {
		b.closers[i]()
	}
}

func openBackend(ctx context.Context, o *options) (*backend, error) {
	if o.store == "memory" {
		return memoryBackend(), nil
	}
	b := &backend{}
	where, opts := "the Redis at "+redacted(o.redis), &redis.Options{}
	if given, err := o.redisOptions(); err != nil {
		return nil, err
	} else if given != nil {
		opts = given
	} else {
		m, err := embeddedRedis()
		if err != nil {
			return nil, err
		}
		b.onClose(m.Close)
		where, opts.Addr = "an embedded Redis (miniredis)", m.Addr()
	}
	if err := b.overRedis(ctx, o.store, opts); err != nil {
		b.close()
		return nil, fmt.Errorf("--redis %q: %w", redacted(o.redis), err)
	}
	b.about = fmt.Sprintf("Each has a connection to %s, a store (%s) and a limiter of its own,\n"+
		"as if on a machine of its own.", where, o.store)
	return b, nil
}

func memoryBackend() *backend {
	shared := tokenbucket.NewMemoryStore()
	return &backend{
		about: "All use one MemoryStore, which shares a bucket only within one process: gateways on machines of their own\n" +
			"need Redis.",
		newStore: func() tokenbucket.Store { return shared },
	}
}

func embeddedRedis() (*miniredis.Miniredis, error) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true) // keys and locks expire as in a real Redis
	if err := m.Start(); err != nil {
		return nil, fmt.Errorf("embedded Redis: %w", err)
	}
	return m, nil
}

// overRedis configures stores in Redis, each with a connection of its own. Their keys have a random prefix, which no other run uses.
func (b *backend) overRedis(ctx context.Context, store string, opts *redis.Options) error {
	client := redis.NewClient(opts)
	b.onClose(func() { client.Close() })
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := client.Ping(ctx).Err(); err != nil {
		return err
	}
	prefix := "tokenbucket-demo:" + strconv.FormatUint(rand.Uint64(), 36) + ":"
	b.onClose(func() { removeKeys(client, prefix) })
	b.prefix = prefix
	b.connect = func() *redis.Client {
		own := *opts // a client fills in defaults
		return redis.NewClient(&own)
	}
	b.newStore = func() tokenbucket.Store {
		own := *opts // a client fills in defaults
		c := redis.NewClient(&own)
		b.onClose(func() { c.Close() })
		if store == "lock" {
			return tokenbucket.NewRedisStore(c, tokenbucket.WithKeyPrefix(prefix))
		}
		return tokenbucket.NewRedisScriptStore(c, tokenbucket.WithKeyPrefix(prefix))
	}
	return nil
}

// removeKeys deletes the demo's keys. Keys that it cannot delete expire.
func removeKeys(client *redis.Client, prefix string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	bucket := prefix + "{" + bucketName + "}"
	client.Del(ctx, bucket, bucket+":lock")
}

// removeAll deletes all keys with the prefix, for --console, which has several buckets.
func removeAll(client *redis.Client, prefix string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for keys := client.Scan(ctx, 0, prefix+"*", 1000).Iterator(); keys.Next(ctx); {
		client.Del(ctx, keys.Val())
	}
}
