package redistest

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Dialing has goleak overlook what go-redis leaves for a second after a client was closed whose server was away: a goroutine
// that still tries to reach it.
var Dialing = goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")

// Main is what TestMain does: it runs the tests, stops the shared server and what else there is to stop, fails if a goroutine is
// left, and exits.
func Main(m *testing.M, stop ...func()) {
	code := m.Run()
	StopShared()
	for _, s := range stop {
		s()
	}
	if code == 0 {
		if err := goleak.Find(Dialing); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL:", err)
			code = 1
		}
	}
	os.Exit(code)
}
