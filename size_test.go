package tokenbucket

import (
	"os"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// FullSize reports whether tests run in full size: in CI, and with TOKENBUCKET_LONG=1. Otherwise they take a sample where a note says so.
// CI runs them twice: those with the race detector are a sample, since that takes ten times as long.
func FullSize() bool {
	return os.Getenv("CI") == "true" && !redistest.Raced || os.Getenv("TOKENBUCKET_LONG") == "1"
}

// sized is what a test does in full size, or a part of it that takes less time: with the race detector a fifth of that part, since races need
// goroutines that meet, and not many of them. Models of one goroutine are not compiled then
// (//go:build !race), and properties of one are skipped.
func sized(full, part int) int {
	switch {
	case FullSize():
		return full
	case redistest.Raced:
		return (part + 4) / 5
	}
	return part
}

// Sized is sized for the tests outside of the package.
func Sized(full, part int) int { return sized(full, part) }
