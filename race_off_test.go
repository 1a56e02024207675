//go:build !race

package tokenbucket

// Raced reports whether the race detector is on.
const Raced = false
