// Package redistest tests the parts of the package internal/redistest that take seconds: its clusters, and what of its proxies is found by
// waiting for timeouts.
package redistest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func TestCluster(t *testing.T) {
	c := redistest.StartCluster(t)
	require.Len(t, c.Nodes, 6)
	require.NoError(t, c.Client(t).Set(context.Background(), "key", "value", time.Minute).Err())
}
