package tokenbuckettest_test

import (
	"log/slog"
	"os"
	"testing"
)

// TestMain keeps the outages that the tests make out of their output.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}
