package registry_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A call of a key that comes while a load takes effect does not leave those behind that wait for the key by the row of before.
func TestKeyThatIsAskedDuringALoad(t *testing.T) {
	gone, cancel := context.WithCancel(ctx)
	cancel()
	source, version := &fake{}, int64(0)
	table := func(rate float64) {
		version++
		all := []registry.Limit{{Name: "/k/*", Row: "k", Rate: rate, MaxWait: time.Hour, PerKey: true, Version: version}}
		for i := range 500 {
			all = append(all, registry.Limit{Name: fmt.Sprint("/other/", i), Row: fmt.Sprint(i), Rate: float64(version), Version: version})
		}
		source.set(all...)
	}
	table(0.001)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	for i := range 25 {
		name := fmt.Sprint("/k/", i)
		table(0.001)
		require.NoError(t, r.Reload(ctx))
		enter(t, r, name)
		passed := make(chan error, 1)
		go func() {
			_, err := r.Enter(ctx, name)
			passed <- err
		}()
		l, err := r.Limiter(name)
		require.NoError(t, err)
		require.Eventually(t, func() bool { calls, _ := l.Waiting(); return calls > 0 }, 10*time.Second, 100*time.Microsecond)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = r.Enter(gone, name)
				}
			}
		}()
		table(1000)
		require.NoError(t, r.Reload(ctx))
		close(stop)
		<-stopped
		select {
		case err := <-passed:
			require.NoError(t, err)
		case <-time.After(5 * time.Second):
			require.FailNow(t, "the call waits by the row of before")
		}
	}
}
