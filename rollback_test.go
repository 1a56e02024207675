package tokenbucket

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// predicting is a process that has used a bucket alone, so that it predicts what its batches make of it.
type predicting struct {
	t      *testing.T
	store  Store
	client *redis.Client
	batch  func() *permit.Batch
	kept   *redisbucket.Session
	key    string // of the bucket
	last   decision
}

// startPredicting takes permits until the process predicts.
func startPredicting(t *testing.T, store Store, client *redis.Client, batch func() *permit.Batch) *predicting {
	p := &predicting{t: t, store: store, client: client, batch: batch, kept: new(redisbucket.Session)}
	p.key = keyIn(store, batch().Name)
	p.again()
	return p
}

// take asks for permits, with what the process remembers of the bucket.
func (p *predicting) take(n int64) (*permit.Batch, error) {
	b := p.batch()
	b.Requests[0].Permits, b.Session = n, p.kept
	if p.last.ClockMicros != 0 {
		b.ServerMicros, b.ServerRead = p.last.ClockMicros, time.Now()
	}
	out, err := apply(background, p.store, b)
	if err == nil {
		p.last = out
	}
	return b, err
}

// again takes permits until a prediction is right: on a busy machine one may be too old when it comes to the server.
func (p *predicting) again() {
	p.t.Helper()
	require.NoError(p.t, redistest.Poll(20*time.Second, func() error {
		_, err := p.take(1)
		if err == nil && p.last.Local == 0 {
			err = errors.New("no prediction, or a wrong one")
		}
		return err
	}))
}

func (p *predicting) text() string { return p.client.Get(background, p.key).Val() }

func (p *predicting) set(text string) {
	require.NoError(p.t, p.client.Set(background, p.key, text, 24*time.Hour).Err())
}

// A replica without the last writes becomes the master. The bucket goes on from an older state, and its next grants have numbers that were
// used before. A process that remembers the newer state must not mistake the new one for it.
func TestPredictionAfterRollback(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := prefixOf(t)
	for which, store := range redisStores(client, WithKeyPrefix(prefix)) {
		t.Run(which, func(t *testing.T) {
			large := func() *permit.Batch {
				b := takes(which, 1)
				b.Terms, b.Initial = termsOf(config{Rate: 0.001, Size: 1e6, Floor: 1}), 1e6
				return b
			}
			p := startPredicting(t, store, client, large)
			replica := p.text()
			_, err := p.take(1)
			require.NoError(t, err)
			p.set(replica)

			b := large()
			b.Requests[0].Permits = 1000
			other, err := apply(background, store, b)
			require.NoError(t, err)
			require.Equal(t, p.last.Bucket.Seq, other.Bucket.Seq, "the new master counts as the old one did")
			_, err = p.take(1)
			require.NoError(t, err)
			require.InDelta(t, other.Bucket.StoredPermits-1, p.last.Bucket.StoredPermits, 0.5, "1000 permits of the other process")
			p.again()
		})
	}
}

// A prediction is not written over a state that is not the remembered one to the last byte.
func TestPredictionOverAnother(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for which, store := range redisStores(client, WithKeyPrefix(prefixOf(t))) {
		t.Run(which, func(t *testing.T) {
			p := startPredicting(t, store, client, func() *permit.Batch { return takes(which, 1) })
			spoilt := p.text() + "x"
			p.set(spoilt)
			_, err := p.take(1)
			require.ErrorIs(t, err, ErrCorruptState)
			require.ErrorContains(t, err, fmt.Sprintf("%q", p.key))
			require.Equal(t, spoilt, p.text())

			p.set(strings.TrimSuffix(spoilt, "x"))
			p.again()
			newer, ours := strings.CutSuffix(p.text(), " 5 5 1 0")
			require.True(t, ours)
			p.set(newer + " 7 5 1 7")
			_, err = p.take(1)
			require.NoError(t, err)
			require.EqualValues(t, 7, p.last.Bucket.Version, "the newest configuration wins")
			require.Equal(t, 7.0, p.last.Bucket.Rate)
			require.True(t, strings.HasSuffix(p.text(), " 7 5 1 7"), p.text())
		})
	}
}

// A refund is refused by a bucket that has fallen back to a state before the grant, also if another process was granted exactly the same
// place meanwhile: under the same number, at the same time, from the same balance.
func TestRefundAfterRollback(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	stores := redisStores(client, WithKeyPrefix(prefixOf(t)), WithLocalTime())
	stores["memory"] = NewMemoryStore()
	for which, store := range stores {
		t.Run(which, func(t *testing.T) {
			ask := func(requests ...permit.Request) (*permit.Batch, decision) {
				b := takes(which, 1)
				b.Requests, b.Epoch, b.LocalMicros = requests, engine.NewEpoch(), func() int64 { return 1_700_000_000_000_000 }
				out, err := apply(background, store, b)
				require.NoError(t, err)
				return b, out
			}
			roll := rollback(t, client, store)
			_, out := ask(permit.Request{Permits: 10, MaxWaitMicros: maxExact}) // in debt, from now on
			old := roll(&out.Bucket, "")
			held, was := ask(permit.Request{Permits: 1, MaxWaitMicros: maxExact})
			for _, n := range []int64{1, 100} {
				roll(&out.Bucket, old)
				_, granted := ask(permit.Request{Permits: n, MaxWaitMicros: maxExact})
				require.Equal(t, was.Bucket.Seq, granted.Bucket.Seq, "the new master counts as the old one did")
				back, after := ask(permit.Request{Op: permit.GiveBack, Back: held.Requests[0].Grant.Place.Refund(was.Bucket.setting, 0)})
				require.False(t, back.Requests[0].Grant.OK, "%d permits of the other process", n)
				require.Equal(t, granted.Bucket.NextFreeTicketMicros, after.Bucket.NextFreeTicketMicros)
			}
		})
	}
}

// rollback returns a function that returns a bucket's state, or puts it back to an old one.
func rollback(t *testing.T, client *redis.Client, store Store) func(b *PermitBucket, old string) string {
	if m, ok := store.(*MemoryStore); ok {
		var kept PermitBucket
		return func(b *PermitBucket, old string) string {
			if old == "" {
				kept = *b
			} else {
				m.buckets[keyName(b.Name)].state = kept
			}
			return "kept"
		}
	}
	return func(b *PermitBucket, old string) string {
		key := keyIn(store, b.Name)
		if old == "" {
			return client.Get(background, key).Val()
		}
		require.NoError(t, client.Set(background, key, old, 24*time.Hour).Err())
		return old
	}
}

// keyIn is a bucket's key in Redis.
func keyIn(store Store, name string) (key string) {
	switch s := store.(type) {
	case *RedisStore:
		key, _ = s.redis.Keys(keyName(name))
	case *RedisScriptStore:
		key, _ = s.redis.Keys(keyName(name))
	}
	return key
}
