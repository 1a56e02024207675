package locks

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// job is what a process does that stops itself while it holds the lock.
type job struct {
	Redis, Prefix, Name string
	TTL                 time.Duration
	// Warm permits are taken before, so that the process knows the bucket.
	Warm int
	// Pause is the step after whose reply it stops; after a commit there is a second caller already, and the lock is kept.
	Pause step
}

// reads reports whether the process reads after its stop.
func (j job) reads() bool { return j.Pause == obtain && j.Warm == 0 }

// told is the result of a commit that was sent after the stop, or of a call.
type told struct {
	Commit  string `json:",omitempty"`
	Granted bool
	Err     string `json:",omitempty"`
}

// hold is such a process. It stops twice: at the step, and again when the commit that follows has been answered. Then it
// goes on until its calls are answered.
func hold(ctx context.Context, j *job, tell func(told)) error {
	client := redis.NewClient(&redis.Options{Addr: j.Redis})
	defer func() { _ = client.Close() }()
	answers := make(chan told, 2)
	tap := &tapped{RedisClient: client}
	store := tokenbucket.NewRedisStore(tap, tokenbucket.WithKeyPrefix(j.Prefix), tokenbucket.WithLockTTL(j.TTL))
	l, err := limiter(j.Name, store)
	if err != nil {
		return err
	}
	take := func(ctx context.Context) {
		ok, err := l.TryAcquire(ctx, 1, 0)
		a := told{Granted: ok}
		if err != nil {
			a.Err = err.Error()
		}
		answers <- a
	}
	for range j.Warm {
		take(background)
		if a := <-answers; !a.Granted {
			return fmt.Errorf("not granted: %s", a.Err)
		}
	}
	calls, stops, hindered := 1, 0, false
	lock := j.Prefix + "{" + j.Name + "}:lock"
	if j.Pause == commit { // a lock is kept by one who has waited for it
		if err := client.Set(background, lock, "first", 0).Err(); err != nil {
			return err
		}
		hindered = true
	}
	tap.after = func(s step, cmd redis.Cmder) { // by one goroutine, the one that takes the batches, except for releases
		switch {
		case s == obtain && hindered && cmd.Err() == redis.Nil:
			hindered = false
			_ = client.Del(background, lock).Err()
		case s == j.Pause && stops == 0 && cmd.Err() == nil:
			stops++
			if s == commit {
				calls++
				second := &joining{Context: background, joined: make(chan struct{})}
				go take(second)
				<-second.joined
			}
			stopSelf()
		case s == commit && stops == 1:
			stops++
			tell(told{Commit: answer(cmd)})
			stopSelf()
		}
	}
	take(background)
	for range calls {
		tell(<-answers)
	}
	<-ctx.Done()
	return nil
}

// startHolder starts such a process. If the test fails, it does not wait for one that stands still.
func startHolder(t *testing.T, j job) *worker.Worker[told] {
	t.Helper()
	c := worker.Start[told](t, holderEnv, j)
	t.Cleanup(func() { _ = c.Kill() })
	awaitStop(t, c.Pid)
	return c
}

// holds are the moments at which a holder of the lock can stop: when it has read, when it has the lock and knows the bucket,
// so that it will not read, and when it has kept the lock for its next batch.
var holds = map[string]job{
	"after its read":     {Pause: read},
	"after its obtain":   {Pause: obtain, Warm: 2},
	"with a kept lock":   {Pause: commit},
	"before it may read": {Pause: obtain},
}

// A process that is stopped while it holds the lock, for longer than the lock lives, writes nothing when it goes on, whether the lock is
// free by then or another process holds it. Others are served within the lock's time to live, by either store. Its own call is decided
// again, and every permit is accounted for.
func TestC1HolderPausedPastTTL(t *testing.T) {
	server := redistest.Start(t)
	late := faultlab.MeasureTrips(t, server.Addr)
	const ttl = 2 * time.Second // a second one would not fit into what within allows
	pause := faultlab.Lasting(ttl+200*time.Millisecond, 2*ttl)
	for when, j := range holds {
		for which := range faultlab.Stores {
			for _, foreign := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, others by %s, lock foreign %v", when, which, foreign), func(t *testing.T) {
					t.Parallel()
					j := j
					p := newPlace(t, server)
					j.Redis, j.Prefix, j.Name, j.TTL = p.Addr, p.Prefix, p.Name, ttl
					others := p.open(which, ttl)
					ok, err := others.TryAcquire(background, 1, 0)
					require.NoError(t, err)
					require.True(t, ok)
					c := startHolder(t, j)
					stopped := time.Now()
					before := p.text()
					if j.Pause != commit { // whose lock may be gone: it is kept for 20 ms
						require.NotEmpty(t, p.holder(), "it holds the lock")
					}

					ok, err = others.TryAcquire(background, 1, 0)
					took := time.Since(stopped)
					require.NoError(t, err)
					require.True(t, ok)
					within(t, "the next was served after", took, ttl+50*time.Millisecond, late)
					require.NotEqual(t, before, p.text())
					p.unlocked(ttl, late)

					time.Sleep(time.Until(stopped.Add(pause)))
					if foreign {
						require.NoError(t, p.Set(background, p.lock(), "somebody else", time.Minute).Err())
					}
					before = p.text()
					require.NoError(t, c.Continue())
					if !j.reads() {
						awaitStop(t, c.Pid) // its commit was answered
						require.Equal(t, before, p.text(), "the late one wrote")
					} else if foreign { // its read returns that the lock is lost, and it waits
						time.Sleep(300 * time.Millisecond)
						require.Equal(t, before, p.text(), "the late one wrote")
					}
					if foreign {
						require.Equal(t, "somebody else", p.holder(), "the late one took the lock away")
						require.NoError(t, p.Del(background, p.lock()).Err())
					}
					if j.reads() {
						awaitStop(t, c.Pid) // the commit of its second attempt was answered
					}
					require.NoError(t, c.Continue())
					events := c.End()
					t.Logf("told: %+v", events)
					calls := 0
					first := "lost" // the commit after the stop
					if j.reads() {
						first = "done"
					}
					for _, e := range events {
						if e.Commit != "" {
							require.Equal(t, first, e.Commit)
							continue
						}
						require.True(t, e.Granted, e.Err)
						calls++
					}
					want := 1
					if j.Pause == commit {
						want = 2
					}
					require.Equal(t, want, calls)
					p.taken(2 + j.Warm + calls)
					p.unlocked(ttl, late)
				})
			}
		}
	}
}

// A process that is killed while it holds the lock is out of the way when the lock's time to live is over, for either store,
// and nothing that it was about to do is done.
func TestC2HolderKilled(t *testing.T) {
	server := redistest.Start(t)
	late := faultlab.MeasureTrips(t, server.Addr)
	const ttl = 2 * time.Second // see above
	for when, j := range holds {
		for which := range faultlab.Stores {
			t.Run(fmt.Sprintf("%s, others by %s", when, which), func(t *testing.T) {
				t.Parallel()
				j, p := j, newPlace(t, server)
				j.Redis, j.Prefix, j.Name, j.TTL = p.Addr, p.Prefix, p.Name, ttl
				others := p.open(which, ttl)
				_, err := others.State(background) // it knows the server
				require.NoError(t, err)
				c := startHolder(t, j)
				if j.Pause != commit {
					require.NotEmpty(t, p.holder(), "it holds the lock")
				}
				require.NoError(t, c.Kill())
				killed := time.Now()
				ok, err := others.TryAcquire(background, 1, 0)
				took := time.Since(killed)
				require.NoError(t, err)
				require.True(t, ok)
				within(t, "the next was served after", took, ttl+100*time.Millisecond, late)
				p.unlocked(0, late)
				c.End()
				done := j.Warm + 1
				if j.Pause == commit {
					done++ // its first batch was committed
				}
				p.taken(done)
			})
		}
	}
}
