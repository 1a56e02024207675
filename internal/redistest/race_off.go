//go:build !race

package redistest

// Raced reports whether the race detector is on.
const Raced = false
