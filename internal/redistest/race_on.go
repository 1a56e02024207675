//go:build race

package redistest

// Raced reports whether the race detector is on. A goroutine that waits then takes some 40 KB.
const Raced = true
