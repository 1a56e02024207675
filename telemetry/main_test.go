package telemetry_test

import (
	"testing"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }
