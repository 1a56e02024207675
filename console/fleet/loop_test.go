package fleet

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// answering is a client whose Redis replies, or hangs.
type answering struct {
	mu    sync.Mutex
	hangs bool
	err   error
	at    []time.Time
	ends  int
}

func (a *answering) Process(ctx context.Context, cmd redis.Cmder) error {
	a.mu.Lock()
	hangs, err := a.hangs, a.err
	a.at = append(a.at, time.Now())
	args := cmd.Args()
	if keys := args[2].(int); args[3+keys+5].(string) == "1" {
		a.ends++
	}
	a.mu.Unlock()
	if hangs {
		<-ctx.Done()
		err = ctx.Err()
	}
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	cmd.(interface{ SetVal([]string) }).SetVal([]string{statusDone, strconv.FormatInt(time.Now().UnixMilli(), 10)})
	return nil
}

// A Publisher beats about every two seconds, not in step with others, and publishes its end. It leaves nothing behind.
func TestBeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, s := &answering{}, newStub("/a")
		p, err := NewPublisher(a, s)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		a.mu.Lock()
		require.InDelta(t, 30, len(a.at), 3)
		gaps := map[time.Duration]bool{}
		for i, at := range a.at[1:] {
			gap := at.Sub(a.at[i])
			require.InDelta(t, BeatEvery, gap, float64(BeatEvery/10))
			gaps[gap] = true
		}
		a.mu.Unlock()
		require.Greater(t, len(gaps), 10)
		require.NoError(t, p.Close(t.Context()))
		require.Equal(t, 1, a.ends)
		require.Equal(t, Missed{}, p.Missed())
	})
}

// reporting is a source with news.
type reporting struct {
	*stub
	news chan struct{}
}

func (r reporting) News() <-chan struct{} { return r.news }

// News are published within a quarter of a second, but not more often than that.
func TestNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, s := &answering{}, reporting{newStub("/a"), make(chan struct{}, 1)}
		beats := func() int {
			a.mu.Lock()
			defer a.mu.Unlock()
			return len(a.at)
		}
		p, err := NewPublisher(a, s)
		require.NoError(t, err)
		time.Sleep(10*time.Second + leastGap)
		before := beats()
		s.news <- struct{}{}
		time.Sleep(leastGap)
		synctest.Wait()
		require.GreaterOrEqual(t, beats(), before+1)
		time.Sleep(leastGap)
		synctest.Wait()
		require.GreaterOrEqual(t, beats(), before+2, "and what follows from it")
		before = beats()
		for range 10_000 {
			select {
			case s.news <- struct{}{}:
			default:
			}
			time.Sleep(time.Millisecond)
		}
		require.InDelta(t, 40, beats()-before, 2)
		time.Sleep(2 * leastGap)
		before = beats()
		time.Sleep(20 * time.Second)
		require.InDelta(t, 10, beats()-before, 2)
		require.NoError(t, p.Close(t.Context()))
	})
}

// A change, and a load that fails or succeeds again, is news; another load is none.
func TestLoadsAreNews(t *testing.T) {
	m := NewMeter()
	for i, l := range []struct {
		load registry.Load
		news bool
	}{
		{registry.Load{Added: 3}, true}, {registry.Load{}, false}, {registry.Load{Changed: 1}, true}, {registry.Load{Removed: 1}, true},
		{registry.Load{Err: errors.New("away")}, true}, {registry.Load{Err: errors.New("away")}, false}, {registry.Load{}, true}, {registry.Load{}, false},
	} {
		m.Loaded(l.load)
		require.Equal(t, l.news, len(m.News()) == 1, "load %d", i)
		for len(m.news) > 0 {
			<-m.news
		}
	}
}

// While Redis hangs, each beat is given up before the next is due, and Close does not wait for longer than it may.
func TestHangingRedis(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, s := &answering{hangs: true}, newStub("/a")
		p, err := NewPublisher(a, s)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.InDelta(t, 15, p.Missed().Beats, 2)
		require.NotEmpty(t, p.Missed().Err)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Error(t, p.Close(ctx))
		require.LessOrEqual(t, time.Since(began), time.Second)
	})
}

// Redis' refusal of writes is logged once, and again after a recovery.
func TestRefusedWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &strings.Builder{}
		a, s := &answering{err: reply("NOPERM nothing for you")}, newStub("/a")
		p, err := NewPublisher(a, s, WithLogger(logTo(log)))
		require.NoError(t, err)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, 1, strings.Count(log.String(), "NOPERM"))
		a.mu.Lock()
		a.err = nil
		a.mu.Unlock()
		time.Sleep(5 * time.Second)
		a.mu.Lock()
		a.err = reply("NOPERM once more")
		a.mu.Unlock()
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, 2, strings.Count(log.String(), "NOPERM"))
		require.Error(t, p.Close(t.Context()))
	})
}

// A beat without news is small, and everything is published again from time to time.
func TestOnlyChangesArePublished(t *testing.T) {
	s := newStub("/a", "/b")
	s.limits["/a"].Granted = 7
	l := newLedger()
	at := clock{time.Now()}
	told := func() (limits, rows int) {
		var r Report
		s.Report(t.Context(), &r)
		l.note(&r, at)
		for more := true; more; {
			var w *write
			w, more = l.next()
			l.done(w, 1)
			limits, rows = limits+len(w.limits), rows+len(w.rows)
		}
		return limits, rows
	}
	pairs := func(a, b int) [2]int { return [2]int{a, b} }
	require.Equal(t, [2]int{2, 2}, pairs(told()))
	require.Equal(t, [2]int{0, 0}, pairs(told()))
	s.count("/b", 1, 0)
	require.Equal(t, [2]int{1, 0}, pairs(told()))
	s.limits["/b"].Config.Rate = 8
	require.Equal(t, [2]int{1, 1}, pairs(told()))
	l.forget()
	require.Equal(t, [2]int{2, 2}, pairs(told()))
	require.Equal(t, [2]int{0, 0}, pairs(told()))
}

// The rest of a beat whose write failed is published by the next one, even if nothing has changed.
func TestUnsentIsPublishedNext(t *testing.T) {
	l := newLedger()
	r := Report{}
	for i := range mostInWrite + 1 {
		r.Limits = append(r.Limits, Limit{Name: strconv.Itoa(i), Counters: Counters{Granted: 1}})
	}
	beat := func(fails bool) (limits int) {
		l.note(&r, clock{time.Now()})
		for more := true; more; {
			var w *write
			if w, more = l.next(); fails {
				l.doubt(w)
				return 0
			}
			l.done(w, 1)
			limits += len(w.limits)
		}
		return limits
	}
	require.Equal(t, mostInWrite+1, beat(false))
	for i := range r.Limits {
		r.Limits[i].Granted++
	}
	beat(true)
	require.Equal(t, mostInWrite+1, beat(false))
	require.Zero(t, beat(false))
}

// Limits beyond the bound, and invalid names, are omitted and counted.
func TestTooManyLimits(t *testing.T) {
	l := newLedger()
	var r Report
	for i := range MostLimits + 3 {
		r.Limits = append(r.Limits, Limit{Name: strconv.Itoa(i), Counters: Counters{Granted: 1}})
	}
	r.Limits[0].Name, r.Limits[1].Name = "", strings.Repeat("x", 513)
	l.note(&r, clock{time.Now()})
	require.Len(t, l.queue, MostLimits)
	require.Contains(t, l.fields.all[infoField].now, `"more_limits":3`)
}

// Events are kept until they are published, and those beyond the bound are counted.
func TestTooManyEvents(t *testing.T) {
	l := newLedger()
	r := Report{Events: make([]Event, mostPending+5)}
	for i := range r.Events {
		r.Events[i] = Event{Kind: LimitAdded, Limit: strings.Repeat("é", 400), From: strings.Repeat("\xff", 1000)}
	}
	l.note(&r, clock{time.Now()})
	require.Len(t, l.events, mostPending)
	require.Less(t, len(l.events[0].text), mostEventSize)
	l.note(&Report{}, clock{time.Now()})
	require.Contains(t, l.fields.all[infoField].now, `"events":5`)
}

// An instance publishes its end once, however often and concurrently it is closed.
func TestClosedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &answering{}
		p, err := NewPublisher(a, newStub("/a"), WithLogger(slog.New(slog.DiscardHandler)))
		require.NoError(t, err)
		time.Sleep(3 * time.Second)
		a.mu.Lock()
		a.err = errors.New("away")
		a.mu.Unlock()
		require.Error(t, p.Close(t.Context()))
		a.mu.Lock()
		a.err, a.ends = nil, 0
		a.mu.Unlock()
		var closing sync.WaitGroup
		for range 5 {
			closing.Go(func() { assert.NoError(t, p.Close(t.Context())) })
		}
		closing.Wait()
		require.Equal(t, 1, a.ends)
	})
}
