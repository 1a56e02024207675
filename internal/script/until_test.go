package script

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Every context ends shortly before its deadline, and most calls share one.
func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var u Until
		contexts := map[any]bool{}
		for i := range 1000 {
			timeout := time.Second
			if i == 500 {
				timeout = 100 * time.Millisecond
			}
			deadline := time.Now().Add(timeout)
			ctx := u.Context(deadline)
			require.NoError(t, ctx.Err())
			end, ok := ctx.Deadline()
			require.True(t, ok)
			require.True(t, end.Before(deadline))
			require.LessOrEqual(t, deadline.Sub(end), timeout/10)
			contexts[ctx] = true
			time.Sleep(time.Millisecond)
		}
		require.Less(t, len(contexts), 30)
		last := u.Context(time.Now().Add(time.Second))
		time.Sleep(time.Second)
		require.Error(t, last.Err())
	})
}

// Calls with deadlines of every length share contexts, so contexts that outlast their calls do not accumulate.
func TestUntilOfManyKinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var u Until
		contexts := map[any]bool{}
		for i := range 20_000 {
			timeout := []time.Duration{time.Second, time.Minute, time.Minute + time.Duration(i)*time.Millisecond}[i%3]
			deadline := time.Now().Add(timeout)
			ctx := u.Context(deadline)
			require.NoError(t, ctx.Err())
			end, _ := ctx.Deadline()
			require.True(t, end.Before(deadline))
			require.LessOrEqual(t, deadline.Sub(end), timeout/10)
			contexts[ctx] = true
			time.Sleep(time.Millisecond)
		}
		require.Less(t, len(contexts), 1000)
		time.Sleep(2 * time.Minute)
	})
}

func BenchmarkUntil(b *testing.B) {
	for _, timeouts := range [][]time.Duration{{time.Second}, {time.Second, time.Minute}} {
		b.Run(fmt.Sprint(len(timeouts)), func(b *testing.B) {
			b.ReportAllocs()
			var u Until
			for i := range b.N {
				u.Context(time.Now().Add(timeouts[i%len(timeouts)]))
			}
		})
	}
}
