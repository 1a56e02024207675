// Package servers tests servers that reply with an error: out of memory, read-only, loading, misconfigured, without their replicas, locked
// up, full. Callers get the cause, in time; nothing is half done; and permits are granted again soon after the server has recovered.
package servers

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9/logging"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var background = context.Background()

func TestMain(m *testing.M) {
	logging.Disable() // each failed dial would be a line
	faultlab.Parallel(6)
	goleak.VerifyTestMain(m, redistest.Dialing)
}
