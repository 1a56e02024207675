package redisbucket

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

var background = context.Background()

// counter is a bucket that counts the permits that were ever taken.
type counter struct{ taken int64 }

func (c *counter) Parse(text string, _ *permit.Terms) (err error) {
	c.taken = 0
	if text != "" {
		c.taken, err = strconv.ParseInt(text, 10, 64)
	}
	return err
}

func (c *counter) Decide(nowMicros int64, b *permit.Batch, out *permit.Outcome) error {
	*out = permit.Outcome{NowMicros: nowMicros, ClockMicros: nowMicros, Changed: len(b.Requests) > 0}
	for i := range b.Requests {
		c.taken += b.Requests[i].Permits
		b.Requests[i].Grant.OK = true
	}
	return nil
}

func (c *counter) AppendText(dst []byte) []byte { return strconv.AppendInt(dst, c.taken, 10) }

func (c *counter) TTLMillis(int64, *permit.Batch) (ttl, least int64) { return 60_000, 30_000 }

func (c *counter) Set(o Bucket) { *c = *o.(*counter) }

// take is a batch that takes a permit.
func take() *permit.Batch {
	return &permit.Batch{Name: "x", Key: "x", LocalMicros: func() int64 { return time.Now().UnixMicro() }, Requests: []permit.Request{{Permits: 1}}}
}

func newCounters(t *testing.T, client Client) *LockStore {
	s, err := NewLockStore(client, Options{Prefix: t.Name() + ":", LockTTL: 10 * time.Second, Logger: new(logger.Logger), NewBucket: func() Bucket { return new(counter) }})
	require.NoError(t, err)
	return s
}

// A holder that lost its lock writes nothing, whatever happened meanwhile, and the state need not have changed for that.
func TestFence(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	store := newCounters(t, client)
	bucket, lock := store.Keys("x")
	for name, meanwhile := range map[string]func(){
		"the lock expired":          func() { client.Del(background, lock) },
		"somebody else took it":     func() { client.Set(background, lock, "other", time.Second) },
		"the state was lost":        func() { client.Del(background, bucket) },
		"somebody wrote without it": func() { client.Append(background, bucket, "1") },
	} {
		t.Run(name, func(t *testing.T) {
			client.Del(background, bucket, lock)
			require.NoError(t, store.Decide(background, take()))
			token, _, err := store.obtain(background, lock, new(atomic.Bool))
			require.NoError(t, err)
			paused := &pausing{Client: client, before: CommitScript.SHA, do: meanwhile}
			b := take()
			stale := newCounters(t, paused)
			stale.prefix = store.prefix
			done, err := stale.underLock(background, b, stale.sessionOf(b), token)
			require.NoError(t, err)
			require.True(t, paused.hit)
			require.False(t, done)
			require.NotEqual(t, "2", client.Get(background, bucket).Val(), "nothing was written")
			if name == "somebody else took it" {
				require.Equal(t, "other", client.Get(background, lock).Val(), "nor another's lock released")
			}
		})
	}
}

// pausing does something in the middle of a read-modify-write.
type pausing struct {
	Client
	before string
	do     func()
	hit    bool
}

func (p *pausing) Process(ctx context.Context, cmd redis.Cmder) error {
	if !p.hit && len(cmd.Args()) > 1 && cmd.Args()[1] == p.before {
		p.hit = true
		p.do()
	}
	return p.Client.Process(ctx, cmd)
}

// A kept lock outlives a process that ends by little.
func TestKeptLockEndsSoon(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	store := newCounters(t, client)
	b := take()
	m := store.sessionOf(b)
	token, waited, err := store.obtain(background, m.lock, new(atomic.Bool))
	require.NoError(t, err)
	require.False(t, waited)
	require.Greater(t, client.PTTL(background, m.lock).Val(), time.Second)
	m.batches = 1
	done, err := store.underLock(background, b, m, token)
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, token, m.token)
	require.LessOrEqual(t, client.PTTL(background, m.lock).Val(), keptTTL)
}
