package task

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/postgres"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// places has callers that each hold a place of a semaphore for a moment.
func places(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	opts := []semaphore.Option{semaphore.WithLease(30 * time.Second), semaphoreTimeout(patience)}
	var s *semaphore.Semaphore
	switch t.Store {
	case "redis":
		var err error
		if s, err = semaphore.NewRedis(client, t.Name, t.Limit, opts...); err != nil {
			return err
		}
	case "postgres":
		pool, err := pgxpool.New(ctx, t.DSN)
		if err != nil {
			return err
		}
		defer pool.Close()
		if err := postgres.Migrate(ctx, pool); err != nil {
			return err
		}
		if s, err = postgres.NewSemaphore(pool, t.Name, t.Limit, opts...); err != nil {
			return err
		}
	default:
		return fmt.Errorf("store %q: want redis or postgres", t.Store)
	}
	t.callers(ctx, tell, func(int) error {
		limited, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		p, err := s.Acquire(limited, 1)
		if err != nil {
			return err
		}
		from := Micros()
		time.Sleep(3 * time.Millisecond)
		tell(Event{What: Used, Permits: 1, From: from, To: Micros()})
		return p.Release(limited)
	})
	limited, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return s.Close(limited)
}

// window has callers whose calls are counted in a sliding window.
func window(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	l, err := slidingwindow.New(t.Name, t.Limit, t.Window, t.Resolution, slidingwindow.WithRedis(client), windowTimeout(patience))
	if err != nil {
		return err
	}
	t.callers(ctx, tell, func(int) error {
		asked := Micros()
		ok, err := l.Allow(context.Background())
		if err != nil {
			return err
		}
		if ok {
			tell(Event{What: Used, Permits: 1, From: asked, To: Micros()})
		}
		time.Sleep(t.Resolution / 10)
		return nil
	})
	return nil
}
