package registry_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A client with invented keys gets a bounded number of buckets. Keys of the hour before keep theirs.
func TestMadeUpKeys(t *testing.T) {
	for name, table := range map[string]struct {
		limits registry.Static
		opts   []registry.Option
	}{
		"of a row":      {limits: registry.Static{{Name: "*", Rate: 1, PerKey: true}}},
		"without a row": {opts: []registry.Option{registry.WithUnknown(registry.Default(registry.Limit{Rate: 1})), registry.WithAllowEmpty()}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				limits, err := registry.New(table.limits, tokenbucket.NewMemoryStore(), append(table.opts, registry.WithMaxKeys(100),
					registry.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))...)
				require.NoError(t, err)
				defer limits.Close()
				bucket := func(key string) string {
					l, err := limits.Limiter(key)
					require.NoError(t, err)
					return l.Name()
				}
				own := bucket("acme")
				buckets := map[string]bool{}
				for i := range 10_000 {
					buckets[bucket(fmt.Sprintf("made-up-%d", i))] = true
				}
				require.Len(t, buckets, 100, "99 of their own, and one that the others share")
				require.Equal(t, own, bucket("acme"))
				require.Equal(t, 2*(10_000-99), limits.Stats().Shared, "Limiter and Name ask for the row")
				require.Equal(t, 1, strings.Count(log.String(), "too many keys"), "%s", &log)

				time.Sleep(time.Hour)
				require.NotEqual(t, bucket("new-1"), bucket("new-2"), "the hour is over")
				for i := range 10_000 {
					bucket(fmt.Sprintf("made-up-again-%d", i))
				}
				require.Equal(t, own, bucket("acme"), "it had one in the hour before")
				require.Equal(t, bucket("other-1"), bucket("other-2"))
				time.Sleep(time.Hour)
				for i := range 10_000 {
					bucket(fmt.Sprintf("made-up-later-%d", i))
				}
				require.Equal(t, own, bucket("acme"), "it has kept one")
			})
		})
	}
}
