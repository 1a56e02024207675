package registry_test

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Made-up keys that come back each hour do not push out a key that is in use each hour, however early in the hour they come.
func TestMadeUpKeysThatComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits, err := registry.New(registry.Static{{Name: "*", Rate: 1, PerKey: true}}, tokenbucket.NewMemoryStore(), registry.WithMaxKeys(100),
			registry.WithLogger(slog.New(slog.DiscardHandler)))
		require.NoError(t, err)
		defer limits.Close()
		bucket := func(key string) string {
			l, err := limits.Limiter(key)
			require.NoError(t, err)
			return l.Name()
		}
		own := bucket("acme")
		for hour := range 6 {
			for i := range 1000 {
				bucket(fmt.Sprintf("made-up-%d", i))
			}
			require.Equal(t, own, bucket("acme"), "hour %d", hour)
			time.Sleep(time.Hour)
		}
	})
}

// A bucket that names beyond the bound share is not one caller's: an upstream's 429 to one of them must not hold back the others.
func TestPenaltyOfSharedNames(t *testing.T) {
	limits, err := registry.New(registry.Static{}, tokenbucket.NewMemoryStore(), registry.WithAllowEmpty(), registry.WithMaxKeys(2),
		registry.WithUnknown(registry.Default(registry.Limit{Rate: 1})), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	defer limits.Close()
	for i, name := range []string{"a", "b", "c", "d"} {
		_, err := limits.Limiter(name)
		require.NoError(t, err)
		_, own := limits.Penalty(name)
		require.Equal(t, i < 2, own, name)
	}
}
