package fleet

import (
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/faultlab/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// waitOnce is a process whose callers each wait for one permit, as long as it takes, and call the upstream with it.
func waitOnce(j *job) error {
	client := j.client()
	defer func() { _ = client.Close() }()
	l, err := j.limiter(client, tokenbucket.WithStoreTimeout(10*time.Second))
	if err != nil {
		return err
	}
	up, err := dial(j.Upstream)
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
			} else if err := up.call(); err != nil {
				failures <- err
			}
		})
	}
	waiting.Wait()
	_, _ = io.Copy(io.Discard, os.Stdin)
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
			up := startUpstream(t)
			j := job{Do: "wait", Rate: 100, Burst: 10, Callers: waiters, Upstream: up.Addr().String()}.on(t, server, store)
			look := j.open(t, server.Client(t))
			w := worker.Start[struct{}](t, jobEnv, j)
			require.NoError(t, redistest.Poll(30*time.Second, func() error {
				b, err := look.State(background)
				if n := up.count(0, 0); err == nil && (b.Seq <= waiters || n < 50) {
					err = fmt.Errorf("%d of %d wait, %d were served", b.Seq-1, waiters, n)
				}
				return err
			}))
			before := up.count(0, 0)
			require.NoError(t, w.Stop())
			time.Sleep(stop)
			during := up.count(0, 0)
			require.LessOrEqual(t, during-before, int(j.Burst)+20, "it did not stand still")
			continued := micros()
			require.NoError(t, w.Continue())
			time.Sleep(first)
			burst := func() int { return up.count(continued, continued+first.Microseconds()) }
			most := int(j.Burst+j.Rate*first.Seconds()) + 1
			require.NoError(t, redistest.Poll(time.Minute, func() error {
				if n := up.count(0, 0); n < waiters {
					return fmt.Errorf("%d of %d were served", n, waiters)
				}
				return nil
			}))
			w.End()
			arrivals := up.closed()
			late := slices.DeleteFunc(slices.Clone(arrivals), func(e faultlab.Event) bool { return e.At < continued })
			t.Logf("%d before the stop, %d in the first %v after it, of %d; worst window after it %.1f + rate × T",
				during, burst(), first, most, faultlab.Worst(late, j.Rate))
			faultlab.Bit(t, before, waiters-during)
			require.LessOrEqual(t, burst(), most)
			require.Equal(t, waiters, up.count(0, 0))
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
				Timeout: 300 * time.Millisecond, Preload: []string{"GOMAXPROCS=1", burnEnv + "=1"},
			})
			time.Sleep(faultlab.Lasting(4*time.Second, 20*time.Second))
			told := p.End()
			require.Greater(t, len(faultlab.Used(told)), 100, "%v", faultlab.Failures(told))
			withinBound(t, told, rate, burst)
		})
	}
}
