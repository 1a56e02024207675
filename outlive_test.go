package tokenbucket

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A long store timeout keeps no bucket whose limiters are gone: timers do not hold what they would look after.
func TestLongTimeoutKeepsNothing(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for what, store := range map[string]Store{
		"script": NewRedisScriptStore(client, WithKeyPrefix(prefixOf(t))), "lock": NewRedisStore(client, WithKeyPrefix(prefixOf(t))),
		"own": &distant{Store: NewMemoryStore()},
	} {
		t.Run(what, func(t *testing.T) {
			const buckets = 100
			prefix := t.Name()
			kept := func() (n int) {
				for c := range coordinators.All {
					if strings.HasPrefix(c.Name, prefix) {
						n++
					}
				}
				return n
			}
			func() {
				for i := range buckets {
					l, err := NewSmoothBursty(fmt.Sprint(prefix, i), 100, WithStore(store), WithStoreTimeout(time.Hour), quietly)
					require.NoError(t, err)
					for range 2 {
						_, err = l.Try(background)
						require.NoError(t, err)
					}
				}
			}()
			require.Eventually(t, func() bool {
				runtime.GC()
				return kept() <= buckets/10 // the last ones may still be on some stack
			}, 20*time.Second, 20*time.Millisecond, "most of %d are kept", buckets)
			runtime.KeepAlive(store)
		})
	}
}
