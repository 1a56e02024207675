// Package input tests what callers, operators and other programs may get wrong: numbers out of range, values under our keys that
// are not ours, hostile names, and states that another release has written.
package input

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) {
	redistest.Main(m)
}

// limit is how long a call may take on a machine that is busy.
const limit = 30 * time.Second

// patient makes a client wait as long.
func patient(o *redis.Options) { o.ReadTimeout, o.WriteTimeout, o.DialTimeout = limit, limit, limit }

var ctx = context.Background()

// verbs are all that a limiter can be asked for that goes to its store.
func verbs(l *tokenbucket.RateLimiter) map[string]func() error {
	return map[string]func() error{
		"Try":             func() error { _, err := l.Try(ctx); return err },
		"TryAcquire":      func() error { _, err := l.TryAcquire(ctx, 2, time.Hour); return err },
		"Acquire":         func() error { _, err := l.Acquire(ctx, 1); return err },
		"Reserve":         func() error { _, err := l.Reserve(ctx, 3); return err },
		"TryReserve":      func() error { _, err := l.TryReserve(ctx, 3, time.Hour); return err },
		"SetRate":         func() error { return l.SetRate(ctx, 7) },
		"SetRateAndBurst": func() error { return l.SetRateAndBurst(ctx, 7, 7) },
		"Penalize":        func() error { return l.Penalize(ctx, time.Millisecond) },
		"State":           func() error { _, err := l.State(ctx); return err },
		"Reset":           func() error { return l.Reset(ctx) },
	}
}

// content is all that the server has, by key.
func content(client *redis.Client) map[string]string {
	all := map[string]string{}
	for _, key := range client.Keys(ctx, "*").Val() {
		all[key] = client.Dump(ctx, key).Val()
	}
	return all
}

// counter counts the commands that a client sends, except those that open a connection.
type counter struct{ sent atomic.Int64 }

// counted is a client of the server, and its counter.
func counted(t *testing.T, server *redistest.Server) (*redis.Client, *counter) {
	t.Helper()
	c := new(counter)
	client := server.Client(t, patient)
	client.AddHook(c)
	return client, c
}

// DialHook implements redis.Hook.
func (c *counter) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (c *counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.sent.Add(1)
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements redis.Hook.
func (c *counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.sent.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}
