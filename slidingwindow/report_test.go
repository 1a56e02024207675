package slidingwindow

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// deaf is a way on which commands arrive, and their replies do not.
func deaf(ctx context.Context, run func() error) error {
	_ = run()
	<-ctx.Done()
	return ctx.Err()
}

// Permits that a share has admitted are counted in Redis once, although the replies to their reports are lost: other processes have the rest.
func TestShareIsReportedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const limit, share, timeout = 100, 25, 300 * time.Millisecond
		server := new(bubbleRedis)
		cut := &bubbleWay{to: server}
		open := func(c RedisClient) *Limiter {
			l, err := New("x", limit, time.Minute, time.Second, WithRedis(c), WithStoreTimeout(timeout), WithFailurePolicy(LocalShare(share)))
			require.NoError(t, err)
			return l
		}
		a, b := open(cut), open(server)
		_, err := a.Remaining(ctx)
		require.NoError(t, err)
		cut.by(deaf)
		admitted := 0
		for range 400 { // ten seconds
			ok, err := a.Allow(ctx)
			require.NoError(t, err)
			if ok {
				admitted++
			}
			time.Sleep(25 * time.Millisecond)
		}
		require.Equal(t, share, admitted)
		counted := func() int {
			left, err := b.refreshed(t)
			require.NoError(t, err)
			return limit - left
		}
		require.LessOrEqual(t, counted(), share+1, "the first batch took one, and its reply was lost")
		cut.by(nil)
		time.Sleep(2 * maxPause)
		_, _ = a.Allow(ctx)
		synctest.Wait()
		require.LessOrEqual(t, counted(), share+1)
		require.GreaterOrEqual(t, counted(), share)
	})
}

// A report counts again in a state that has begun anew, since the state that it was counted in is lost.
func TestReportAfterALoss(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		server := new(bubbleRedis)
		cut := &bubbleWay{to: server}
		l, err := New("x", 100, time.Minute, time.Second, WithRedis(cut), WithStoreTimeout(300*time.Millisecond), WithFailurePolicy(LocalShare(25)))
		require.NoError(t, err)
		_, err = l.Remaining(ctx)
		require.NoError(t, err)
		cut.by(deaf)
		for range 30 {
			_, err := l.Allow(ctx)
			require.NoError(t, err)
		}
		time.Sleep(2 * maxPause)
		_, _ = l.Allow(ctx) // a probe, which reports
		synctest.Wait()
		time.Sleep(2 * maxPause)
		server.remove(l.machine.key)
		cut.by(nil)
		_, _ = l.Allow(ctx)
		synctest.Wait()
		left, err := l.refreshed(t)
		require.NoError(t, err)
		require.Equal(t, 75, left)
	})
}
