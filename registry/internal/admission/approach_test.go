package admission

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
)

// A call that is summoned to the queue and gives up in the same instant passes the summons on.
func TestSummonsIsPassedOn(t *testing.T) {
	for range 30 { // the call may have left before it is summoned
		synctest.Test(t, func(t *testing.T) {
			l, err := tokenbucket.NewSmoothBursty("a", 0.1, tokenbucket.WithInitialPermits(0))
			require.NoError(t, err)
			r, err := l.Reserve(context.Background(), 1)
			require.NoError(t, err)
			a := &attempt{env: &Env{}, slot: new(Slot), bounds: &bounds{most: 1}, patience: time.Second, reservation: r, reserved: time.Now()}
			ctx, cancel := context.WithCancel(context.Background())
			var after progress
			done := make(chan struct{})
			go func() {
				after, _, err = a.approaches(ctx, progress{permits: ahead})
				close(done)
			}()
			synctest.Wait()
			next := a.slot.approach.join()
			cancel()
			a.slot.approach.summon()
			<-done
			require.True(t, err == nil && after.place == full || isClosed(next.summoned))
			require.NoError(t, r.Cancel(context.Background()))
		})
	}
}
