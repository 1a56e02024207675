//go:build linux && !race

package soak

// raced reports whether the race detector is at work.
const raced = false
