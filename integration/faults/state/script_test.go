package state

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// A cluster's master dies: when its replica is promoted, all who run scripts are soon served by that, with the default options of
// the client.
func TestMasterDies(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	cluster.ElectSoon(t)
	window, err := slidingwindow.New("x", 1_000_000, time.Minute, time.Second, slidingwindow.WithRedis(cluster.Client(t)))
	require.NoError(t, err)
	permits, err := semaphore.NewRedis(cluster.Client(t), "x", 1_000_000)
	require.NoError(t, err)
	defer func() { _ = permits.Close(background) }()
	calls := map[string]func() error{
		"window": func() error {
			_, err := window.Allow(background)
			return err
		},
		"semaphore": func() error {
			_, err := permits.TryAcquire(background, 1, 0)
			if errors.Is(err, semaphore.ErrRefused) {
				return nil
			}
			return err
		},
	}
	for _, call := range calls {
		require.NoError(t, call())
	}
	admin := cluster.Client(t)
	master, err := admin.MasterForKey(background, "{x}")
	require.NoError(t, err)
	for _, node := range cluster.Nodes {
		if node.Addr == master.Options().Addr {
			require.NoError(t, node.Kill())
		}
	}
	for what, call := range calls {
		require.Error(t, call(), what)
	}
	require.NoError(t, redistest.Poll(30*time.Second, func() error {
		admin.ReloadState(background)
		return admin.Set(background, "{x}", "", time.Minute).Err()
	}))
	promoted := time.Now()
	for what, call := range calls {
		require.NoError(t, redistest.Poll(15*time.Second, call), what)
		t.Logf("%s: served %v after the promotion", what, time.Since(promoted).Round(time.Millisecond))
	}
}
