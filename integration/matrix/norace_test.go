//go:build !race

package matrix

// raced reports whether the race detector is at work.
const raced = false
