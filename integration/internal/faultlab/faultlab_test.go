package faultlab

import (
	"context"
	"os"
	"testing"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// askEnv makes this test binary print the time, as another process.
const askEnv = "TOKENBUCKET_FAULTLAB_TIME"

func TestMain(m *testing.M) {
	Main()
	if os.Getenv(askEnv) != "" {
		tellTime()
		return
	}
	redistest.Main(m)
}

var background = context.Background()
