package registry_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A call whose permit is postponed by a penalty holds neither a place nor a place in the window meanwhile, whenever the penalty comes.
func TestPostponedHoldsNothing(t *testing.T) {
	for _, at := range []time.Duration{0, 40, 79, 80, 85, 95, 99} { // it asks for a place after 80 ms, and is due after 100
		synctest.Test(t, func(t *testing.T) {
			row := bounded("/a", func(l *registry.Limit) {
				l.Concurrent, l.WindowLimit, l.Window, l.MaxWait = 1, 100, 20*time.Second, time.Second
			})
			*row.Burst = 1
			r := openLocal(t, registry.Static{row})
			enter(t, r, "/a").Leave()
			waiting := make(chan *gate.Admission, 1)
			go func() { waiting <- enter(t, r, "/a") }()
			synctest.Wait()
			time.Sleep(at * time.Millisecond)
			require.NoError(t, r.Penalize(ctx, "/a", time.Second))
			time.Sleep(20*time.Millisecond + time.Millisecond)
			taken := 0
			for range 900 / 7 {
				u, _, err := r.Usage(ctx, "/a")
				require.NoError(t, err)
				taken += u.Inside + u.WindowUsed - 1
				time.Sleep(7 * time.Millisecond)
			}
			require.LessOrEqual(t, taken, 20/7+1+2*20/7, "at %v", at)
			a := <-waiting
			require.True(t, a.OK)
			a.Leave()
			r.Close()
		})
	}
}
