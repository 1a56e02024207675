package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

type ours struct {
	s    *semaphore.Semaphore
	mine sync.Map
}

func openOurs(client *redis.Client, name string) (limiter, error) {
	s, err := semaphore.NewRedis(client, name, permits)
	return &ours{s: s}, err
}

func (o *ours) add(ctx context.Context) (string, error) {
	p, err := o.s.Acquire(ctx, 1)
	if err != nil {
		return "", err
	}
	o.mine.Store(p.ID(), p)
	return p.ID(), nil
}

func (o *ours) done(ctx context.Context, id string) error {
	p, _ := o.mine.LoadAndDelete(id)
	return p.(*semaphore.Permit).Release(ctx)
}

func (o *ours) close() { _ = o.s.Close(context.Background()) }

// waitGroup acquires a place under a distributed lock, and holds the lock while it waits for a free place.
type waitGroup struct {
	client *redis.Client
	name   string
	ids    atomic.Int64
}

const (
	lockTTL   = time.Second
	workerTTL = time.Minute
	spin      = time.Millisecond
)

func (w *waitGroup) key(part string) string { return w.name + ":" + part }

func (w *waitGroup) add(ctx context.Context) (string, error) {
	for {
		ok, err := w.client.SetNX(ctx, w.key("lock"), 1, lockTTL).Result()
		if err != nil {
			return "", err
		}
		if ok {
			break
		}
		time.Sleep(spin)
	}
	defer w.client.Del(context.WithoutCancel(ctx), w.key("lock"))
	for {
		workers, err := w.client.SMembers(ctx, w.key("workers")).Result()
		if err != nil {
			return "", err
		}
		living := 0
		for _, id := range workers {
			n, err := w.client.Exists(ctx, w.key(id)).Result()
			if err != nil {
				return "", err
			}
			if n == 0 {
				w.client.SRem(ctx, w.key("workers"), id)
			} else {
				living++
			}
		}
		if living < permits {
			break
		}
		time.Sleep(spin)
	}
	id := strconv.FormatInt(w.ids.Add(1), 10)
	ctx = context.WithoutCancel(ctx)
	if err := w.client.Set(ctx, w.key(id), 1, workerTTL).Err(); err != nil {
		return "", err
	}
	return id, w.client.SAdd(ctx, w.key("workers"), id).Err()
}

func (w *waitGroup) done(ctx context.Context, id string) error {
	if err := w.client.SRem(ctx, w.key("workers"), id).Err(); err != nil {
		return err
	}
	return w.client.Del(ctx, w.key(id)).Err()
}

func (w *waitGroup) close() {}

// list is a semaphore made of a Redis list: a caller that has popped an item holds a permit.
type list struct {
	client *redis.Client
	name   string
}

func openList(client *redis.Client, name string) (limiter, error) {
	for i := range permits {
		if err := client.RPush(context.Background(), name, i).Err(); err != nil {
			return nil, err
		}
	}
	return &list{client, name}, nil
}

func (l *list) add(ctx context.Context) (string, error) {
	got, err := l.client.BLPop(ctx, time.Second, l.name).Result()
	if err != nil {
		return "", err
	}
	if len(got) != 2 {
		return "", fmt.Errorf("unexpected %q", got)
	}
	return got[1], nil
}

func (l *list) done(ctx context.Context, id string) error {
	return l.client.RPush(ctx, l.name, id).Err()
}

func (l *list) close() {}
