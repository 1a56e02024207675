package redistest

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// Busy returns a factor by which a loaded machine may be slower: twice the load per processor, at least 1. Multiply bounds on durations that
// a person would notice by it.
func Busy() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 1
	}
	load, _ := strconv.ParseFloat(strings.Fields(string(text))[0], 64)
	return max(1, 2*load/float64(runtime.NumCPU()))
}
