package faultlab

import (
	"context"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// askEnv makes this test binary print the time, as another process.
const askEnv = "TOKENBUCKET_FAULTLAB_TIME"

func TestMain(m *testing.M) {
	if Working() {
		os.Exit(Main())
	}
	if os.Getenv(askEnv) != "" {
		tellTime()
		return
	}
	code := m.Run()
	if err := goleak.Find(redistest.Dialing); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var background = context.Background()
