//go:build race

package matrix

// raced reports whether the race detector is at work. It takes several times the processor time, so each pair then runs in one of the two ways
// in memory and on one of the two stores on a server, drawn by lot.
const raced = true
