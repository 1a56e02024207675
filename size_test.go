package tokenbucket

import "os"

// FullSize reports whether tests run in full size: in CI, and with TOKENBUCKET_LONG=1. Otherwise they take a sample where a note says so.
// CI runs them twice: those with the race detector are a sample, since that takes ten times as long.
func FullSize() bool {
	return os.Getenv("CI") == "true" && !Raced || os.Getenv("TOKENBUCKET_LONG") == "1"
}

// sized is what a test does in full size, or a part of it that takes less time.
func sized(full, part int) int {
	if FullSize() {
		return full
	}
	return part
}

// Sized is sized for the tests outside of the package.
func Sized(full, part int) int { return sized(full, part) }
