package redistest

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// Busy is by how much a machine that does other things may be slower: twice the load of each processor, at least 1. Bounds of what a
// person waits for are multiplied by it.
func Busy() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 1
	}
	load, _ := strconv.ParseFloat(strings.Fields(string(text))[0], 64)
	return max(1, 2*load/float64(runtime.NumCPU()))
}
