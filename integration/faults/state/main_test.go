// Package state tests what becomes of buckets whose state is lost, goes back in time, or moves: servers that restart empty,
// forget, evict, and are replaced by replicas that lag.
package state

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var background = context.Background()

func TestMain(m *testing.M) {
	logging.Disable() // each failed dial would be a line
	worker.Main(settlerEnv, settle)
	faultlab.Parallel(6)
	goleak.VerifyTestMain(m, redistest.Dialing)
}
