package security

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

const patience = 20 * time.Second // with what goes well; a refused command ends the operation before

// lockTTL is the time to live of a lock that is not released: three round trips of a slow machine, and no longer than a test can wait.
const lockTTL = 300 * time.Millisecond

// client is what all packages can work with.
type client interface {
	tokenbucket.RedisClient
	semaphore.RedisClient
}

// operator does with a client whatever the public API can do, such that the scripts run through all their commands. What takes
// a state of the server that another program has left behind, admin brings about.
type operator struct {
	client
	admin  redis.UniversalClient
	relent func() error // gives the client all rights; may be nil
}

// fresh is a server as it is before the first call: with no keys, and scripts that are not loaded.
func (o *operator) fresh(ctx context.Context) error {
	return errors.Join(o.admin.FlushAll(ctx).Err(), o.admin.ScriptFlush(ctx).Err())
}

// limiters calls all that a limiter has, on a store with a lock that lives for lockTTL.
func (o *operator) limiters(ctx context.Context, store tokenbucket.Store) error {
	open := func(name string, opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
		l, err := tokenbucket.NewSmoothBursty(name, 1000, append(opts, tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(patience))...)
		if err != nil {
			panic(err)
		}
		return l
	}
	l := open("x")
	verbs := map[string]func() error{
		"Try":        func() error { _, err := l.Try(ctx); return err },
		"TryAcquire": func() error { _, err := l.TryAcquire(ctx, 2, time.Second); return err },
		"Acquire":    func() error { _, err := l.Acquire(ctx, 3); return err },
		"Reserve": func() error {
			r, err := l.Reserve(ctx, 20)
			if err != nil {
				return err
			}
			return r.Cancel(ctx)
		},
		"SetRate":         func() error { return l.SetRate(ctx, 2000) },
		"SetRateAndBurst": func() error { return l.SetRateAndBurst(ctx, 2000, 2000) },
		"Penalize":        func() error { return l.Penalize(ctx, time.Millisecond) },
		"State":           func() error { _, err := l.State(ctx); return err },
		"Reset":           func() error { return l.Reset(ctx) },
		"lease": func() error {
			leased := open("y", tokenbucket.WithPrefetch(10*time.Millisecond), tokenbucket.WithInitialPermits(1000))
			for range 20 {
				if _, err := leased.Try(ctx); err != nil {
					return err
				}
			}
			return leased.Close(ctx)
		},
		"a lock of another process": func() error {
			if err := o.admin.Set(ctx, "tokenbucket:{x}:lock", "other", 20*time.Millisecond).Err(); err != nil {
				return err
			}
			_, err := l.Try(ctx)
			return err
		},
		"a lock without an end": func() error {
			if err := o.admin.Set(ctx, "tokenbucket:{x}:lock", "other", 0).Err(); err != nil {
				return err
			}
			_, err := l.Try(ctx)
			return err
		},
	}
	return all(verbs)
}

// all calls each, and says which failed.
func all(verbs map[string]func() error) (failed error) {
	for name, verb := range verbs {
		if err := verb(); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", name, err))
		}
	}
	return failed
}

func (o *operator) script(ctx context.Context) error {
	store := tokenbucket.NewRedisScriptStore(o.client, tokenbucket.WithLockTTL(lockTTL))
	return errors.Join(o.limiters(ctx, store), o.crowd(ctx, store))
}

func (o *operator) lock(ctx context.Context) error {
	return o.limiters(ctx, tokenbucket.NewRedisStore(o.client, tokenbucket.WithLockTTL(lockTTL)))
}

// crowd asks many buckets at once until some of them have shared a call of the script, if the client makes such.
func (o *operator) crowd(ctx context.Context, store tokenbucket.Store) error {
	if _, ok := o.client.(*redis.Client); !ok {
		return nil
	}
	var limiters []*tokenbucket.RateLimiter
	for i := range 32 {
		l, err := tokenbucket.NewSmoothBursty(fmt.Sprint("crowd", i), 1e6, tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(patience))
		if err != nil {
			return err
		}
		limiters = append(limiters, l)
	}
	if err := o.admin.ConfigResetStat(ctx).Err(); err != nil {
		return err
	}
	for {
		if err := o.admin.Do(ctx, "CLIENT", "PAUSE", 20, "WRITE").Err(); err != nil { // all but the first trips wait ashore
			return err
		}
		var group sync.WaitGroup
		errs := make([]error, len(limiters))
		for i, l := range limiters {
			group.Go(func() { _, errs[i] = l.TryReserve(ctx, 1, time.Minute) })
		}
		group.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		stats, err := o.admin.Info(ctx, "commandstats").Result()
		if err != nil || strings.Contains(stats, "cmdstat_mget:") {
			return err
		}
		if ctx.Err() != nil {
			return errors.New("no two buckets shared a call")
		}
	}
}

func (o *operator) semaphore(ctx context.Context) error {
	open := func() *semaphore.Semaphore {
		s, err := semaphore.NewRedis(o.client, "x", 2, semaphore.WithStoreTimeout(patience))
		if err != nil {
			panic(err)
		}
		return s
	}
	ours, theirs := open(), open()
	err := o.semaphores(ctx, ours, theirs)
	if err != nil && o.relent != nil { // so that nothing of it goes on
		err = errors.Join(err, o.relent())
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return errors.Join(err, ours.Close(ctx), theirs.Close(ctx))
}

func (o *operator) semaphores(ctx context.Context, ours, theirs *semaphore.Semaphore) error {
	if err := ours.SetPermits(ctx, 1); err != nil {
		return err
	}
	held, err := ours.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	if _, err := ours.TryAcquire(ctx, 1, 0); !errors.Is(err, semaphore.ErrRefused) {
		return fmt.Errorf("it is held, and TryAcquire says %w", err)
	}
	if _, err := ours.Holders(ctx); err != nil {
		return err
	}
	// Another process waits for the permit, and one until there is no holder. Both receive it by Pub/Sub.
	results := make(chan error, 2)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		p, err := theirs.Acquire(ctx, 1)
		if err == nil {
			err = p.Release(ctx)
		}
		results <- err
	}()
	go func() { results <- semaphore.NewGroup(theirs).Wait(ctx) }()
	err = redistest.Poll(patience, func() error {
		if ctx.Err() != nil {
			return nil
		}
		if n := len(o.admin.PubSubChannels(ctx, "*").Val()); n == 0 {
			return errors.New("nobody listens")
		}
		if n := o.admin.ZCard(ctx, "semaphore:{x}:queue").Val() + o.admin.HLen(ctx, "semaphore:{x}:idle").Val(); n < 2 {
			return errors.New("nobody waits")
		}
		return nil
	})
	if err == nil {
		_, err = ours.Holders(ctx) // with a waiter it reads other keys
	}
	if err := errors.Join(err, ctx.Err(), held.Release(ctx)); err != nil {
		cancel()
		return errors.Join(err, <-results, <-results)
	}
	if err := errors.Join(<-results, <-results); err != nil {
		return err
	}
	// A place that is taken in one process and given back in another.
	place, err := semaphore.NewGroup(ours).Add(ctx)
	if err != nil {
		return err
	}
	return semaphore.NewGroup(theirs).Done(ctx, place.ID())
}

func (o *operator) window(ctx context.Context) error {
	verbs := map[string]func() error{}
	l, err := slidingwindow.New("window", 3, time.Second, 100*time.Millisecond,
		slidingwindow.WithRedis(o.client), slidingwindow.WithStoreTimeout(patience))
	if err != nil {
		return err
	}
	verbs["window Allow"] = func() error { _, err := l.Allow(ctx); return err }
	verbs["window AllowN"] = func() error { _, err := l.AllowN(ctx, 3); return err }
	verbs["window Remaining"] = func() error { _, err := l.Remaining(ctx); return err }
	verbs["window SetLimit"] = func() error {
		if err := l.SetLimit(ctx, 5); err != nil {
			return err
		}
		_, err := l.Allow(ctx)
		return err
	}
	return all(verbs)
}

// flip reads and sets a switch, which is a key by itself.
func (o *operator) flip(ctx context.Context) error {
	s, err := killswitch.NewRedis(o.client, "gateway:switch", killswitch.WithTimeout(patience))
	if err != nil {
		return err
	}
	defer s.Close()
	return errors.Join(s.Err(), s.Set(ctx, false))
}

// everything is all that shares the keys' default prefixes.
func (o *operator) everything(ctx context.Context) error {
	return errors.Join(o.script(ctx), o.fresh(ctx), o.lock(ctx), o.semaphore(ctx), o.window(ctx))
}

// denied lists what Redis has refused since its log was last emptied.
func denied(admin redis.UniversalClient) (all []string) {
	log, err := admin.Do(context.Background(), "ACL", "LOG").Slice()
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range log {
		entry, _ := e.(map[any]any)
		if entry["object"] == "info" { // a store asks once, for a warning, and does without
			continue
		}
		all = append(all, fmt.Sprintf("%v %v (%v)", entry["reason"], entry["object"], entry["context"]))
	}
	return all
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// works requires that everything does.
func works(t *testing.T, c client, admin redis.UniversalClient) {
	t.Helper()
	o := &operator{client: c, admin: admin}
	ctx := within(t, time.Minute)
	require.NoError(t, o.fresh(ctx))
	require.NoError(t, o.everything(ctx))
}

// once is a source of a limit that is gone when it is asked again.
type once struct{ asked bool }

func (o *once) Report(_ context.Context, to *fleet.Report) {
	if !o.asked {
		to.Limits = append(to.Limits, fleet.Limit{Name: "x", Counters: fleet.Counters{Granted: 1}})
	}
	o.asked = true
}

// publish begins, publishes and ends.
func (o *operator) publish(ctx context.Context) error {
	p, err := fleet.NewPublisher(o.client, &once{}, fleet.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	r := fleet.NewReader(o.admin)
	err = redistest.Poll(patience, func() error { // until it has, or has failed to
		s, err := r.Snapshot(ctx)
		if err == nil && len(s.Instances) == 0 && p.Missed().Beats == 0 {
			err = errors.New("nothing was published")
		}
		return err
	})
	if why := p.Missed().Err; why != "" {
		err = errors.Join(err, errors.New(why))
	}
	return errors.Join(err, p.Close(ctx))
}

// console reads what another user publishes.
func (o *operator) console(ctx context.Context) error {
	other := &operator{client: o.admin, admin: o.admin}
	if err := other.publish(ctx); err != nil {
		return err
	}
	r := fleet.NewReader(o.client)
	s, err := r.Snapshot(ctx)
	if err == nil && len(s.Instances) != 1 {
		err = fmt.Errorf("%d instances", len(s.Instances))
	}
	_, err2 := r.History(ctx, "x", time.Time{})
	_, err3 := r.Events(ctx, time.Time{})
	return errors.Join(err, err2, err3)
}
