//go:build linux

// Package soak tests limits of a fleet for as long as one likes, while something goes wrong every five seconds.
//
//	go test -run Soak ./integration/faults/soak -soak 30m -timeout 45m -soak.report "$PWD/docs/soak.md"
package soak

import (
	"context"
	"flag"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

var (
	lasts  = flag.Duration("soak", 0, "how long the soak lasts, at least 10s; 0: 20s, with TOKENBUCKET_LONG=1 3m")
	report = flag.String("soak.report", "", "`file` to write a report to, in Markdown")
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{})
	worker.Main(jobEnv, work)
	redistest.Main(m)
}

var background = context.Background()

// quiet is the client's log, which faults fill with expected lines.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// monotonic is the time by CLOCK_MONOTONIC, in microseconds: the same for all processes of a machine, and never set.
func monotonic() int64 {
	const clock = 1
	var ts syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clock, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		panic(errno)
	}
	return ts.Nano() / 1000
}

// micros is a duration in microseconds; span is the reverse.
func micros(d time.Duration) int64 { return d.Microseconds() }

func span(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }
