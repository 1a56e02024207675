//go:build race

package tokenbucket

// Raced tells that the race detector is on. Each goroutine then takes some 30 KB more.
const Raced = true
