//go:build race

package matrix

// raced reports whether the race detector is at work. It takes several times the processor time, so each pair is then on one of the stores,
// and for half as long in memory.
const raced = true
