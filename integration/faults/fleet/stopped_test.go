package fleet

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// waitOnce is a process whose callers each wait for one permit, as long as it takes, and call the upstream with it.
func waitOnce(ctx context.Context, j *job, _ func(spent)) error {
	client := j.client()
	defer func() { _ = client.Close() }()
	l, err := j.limiter(client, tokenbucket.WithStoreTimeout(10*time.Second))
	if err != nil {
		return err
	}
	up, err := faultlab.Dial(j.Upstream)
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }()
	var waiting sync.WaitGroup
	failures := make(chan error, j.Callers)
	for range j.Callers {
		waiting.Go(func() {
			if _, err := l.Acquire(background, 1); err != nil {
				failures <- err
			} else if err := up.Call(); err != nil {
				failures <- err
			}
		})
	}
	waiting.Wait()
	<-ctx.Done()
	close(failures)
	return <-failures
}

// A process with hundreds of waiters is stopped for three seconds. When it goes on, the permits of those seconds are gone: it
// lets no more pass in the first 100 ms than the bucket and the rate allow, as the upstream counts, and everybody is served in
// the end.
func TestG7StoppedProcess(t *testing.T) {
	const waiters, stop, first = 500, 3 * time.Second, 100 * time.Millisecond
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			up := faultlab.StartUpstream(t)
			j := job{Do: "wait", Rate: 100, Burst: 10, Callers: waiters, Upstream: up.Addr}.on(t, server, store)
			w := worker.Start[spent](t, jobEnv, j)
			require.NoError(t, redistest.Poll(30*time.Second, func() error {
				if n := up.Count(); n < 50 { // all wait by then, and nearly all of them in the process
					return fmt.Errorf("%d of %d were served", n, waiters)
				}
				return nil
			}))
			require.NoError(t, w.Stop())
			require.NoError(t, redistest.Poll(20*time.Second, func() error { return faultlab.Stopped(w.Pid) }))
			before := up.Count()
			time.Sleep(stop)
			during := up.Count()
			require.LessOrEqual(t, during-before, int(j.Burst)+20, "it did not stand still")
			continued := faultlab.Micros()
			require.NoError(t, w.Continue())
			time.Sleep(first)
			burst := func() int { return up.Between(continued, continued+first.Microseconds()) }
			most := int(j.Burst+j.Rate*first.Seconds()) + 1
			require.NoError(t, redistest.Poll(time.Minute, func() error {
				if n := up.Count(); n < waiters {
					return fmt.Errorf("%d of %d were served", n, waiters)
				}
				return nil
			}))
			w.End()
			arrivals := up.End()
			late := slices.DeleteFunc(slices.Clone(arrivals), func(e faultlab.Event) bool { return e.At < continued })
			t.Logf("%d before the stop", during)
			faultlab.Figure(t, fmt.Sprintf("calls in the first %v after it, of %d", first, most), burst())
			faultlab.Figure(t, fmt.Sprintf("fullest window after it above rate × T, of %v", j.Burst), faultlab.Worst(late, j.Rate))
			faultlab.Bit(t, before, waiters-during)
			require.LessOrEqual(t, burst(), most)
			require.Equal(t, waiters, up.Count())
		})
	}
}

// A process with one processor, which a busy loop and the garbage collector want too: its callers are woken late, and so by as
// much, and no more, is the bound exceeded as the upstream sees it.
func TestG8StarvedProcess(t *testing.T) {
	const rate, burst = 200.0, 100.0
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			j := job{}.on(t, server, store)
			p := faultlab.StartProcess(t, faultlab.Job{
				Addrs: []string{server.Addr}, Prefix: j.Prefix, Bucket: j.Name, Store: store, Rate: rate, Burst: burst, Callers: 50,
				Timeout: 300 * time.Millisecond, StoreTimeout: time.Minute, Preload: []string{"GOMAXPROCS=1", burnEnv + "=1"},
			})
			time.Sleep(faultlab.Lasting(4*time.Second, 20*time.Second))
			faultlab.Soon(t, time.Minute, func() bool { return len(faultlab.Used(p.Permits())) > 2*burst })
			told := p.End()
			require.Empty(t, faultlab.Failures(told))
			withinBound(t, told, rate, burst)
		})
	}
}
