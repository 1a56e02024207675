//go:build linux && !race

package soak

// raced tells whether the race detector is at work.
const raced = false
