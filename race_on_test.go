//go:build race

package tokenbucket

// Raced tells that the race detector is on. A goroutine that waits then takes some 40 KB.
const Raced = true
