//go:build !race

package tokenbucket

// Raced tells that the race detector is on.
const Raced = false
