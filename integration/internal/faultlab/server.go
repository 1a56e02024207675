package faultlab

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

//go:embed shim/clock.c
var clockSource []byte

// ErrNoCompiler means that there is no C compiler.
var ErrNoCompiler = errors.New("faultlab: cc is not installed; on Debian: apt-get install gcc libc6-dev")

// Clock is the wall clock of a program that is dynamically linked and asks the C library for the time, as redis-server does;
// it can be stepped while the program runs. Its methods may be called by many goroutines at once.
//
// A Go program asks the kernel, by the vDSO, and is not impressed, even if cgo has linked it dynamically: for those there is
// Job.Skew.
type Clock struct {
	offset *int64 // microseconds, mapped
	env    []string
}

// NewClock returns a clock that is right, for programs that are started with Env. It lives as long as the test. Where there is
// no cc the test is skipped and says so; with CI=true it fails.
func NewClock(t testing.TB) *Clock {
	t.Helper()
	library, err := clockLibrary()
	if errors.Is(err, ErrNoCompiler) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	require.NoError(t, err)
	dir := t.TempDir()
	shim, name := filepath.Join(dir, "clock.so"), filepath.Join(dir, "offset")
	require.NoError(t, os.WriteFile(shim, library, 0o755))
	require.NoError(t, os.WriteFile(name, make([]byte, 8), 0o600))
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { _ = file.Close() }()
	mapped, err := syscall.Mmap(int(file.Fd()), 0, 8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Munmap(mapped) })
	return &Clock{(*int64)(unsafe.Pointer(&mapped[0])), []string{"LD_PRELOAD=" + shim, "TOKENBUCKET_CLOCK=" + name}}
}

// clockLibrary is shim/clock.c, compiled once.
var clockLibrary = sync.OnceValues(func() ([]byte, error) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		return nil, ErrNoCompiler
	}
	dir, err := os.MkdirTemp("", "faultlab")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	source, library := filepath.Join(dir, "clock.c"), filepath.Join(dir, "clock.so")
	if err := os.WriteFile(source, clockSource, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command(cc, "-O2", "-shared", "-fPIC", "-o", library, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("faultlab: %s: %w\n%s", cc, err, out)
	}
	return os.ReadFile(library)
})

// Env is the environment of a program that goes by the clock.
func (c *Clock) Env() []string { return c.env }

// Set sets the offset of the clock.
func (c *Clock) Set(offset time.Duration) { atomic.StoreInt64(c.offset, offset.Microseconds()) }

// Step sets the clock forward, or back.
func (c *Clock) Step(d time.Duration) { atomic.AddInt64(c.offset, d.Microseconds()) }

// Offset returns the offset of the clock.
func (c *Clock) Offset() time.Duration {
	return time.Duration(atomic.LoadInt64(c.offset)) * time.Microsecond
}

// StartStepped starts a redis-server that lives as long as the test and goes by a clock of its own.
func StartStepped(t testing.TB, args ...string) (*redistest.Server, *Clock) {
	t.Helper()
	c := NewClock(t)
	return redistest.StartWith(t, c.Env(), "", args...), c
}
