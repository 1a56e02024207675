// Package redistest starts real redis-servers for tests: each on a free port of 127.0.0.1, with a directory of its own,
// stopped by its process. Where redis-server is not installed a test is skipped and says so; with CI=true it fails.
package redistest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrMissing says that the program is not installed.
var ErrMissing = errors.New("redistest: redis-server is not installed; on Debian: apt-get install redis-server")

// Server is a running redis-server.
type Server struct {
	Addr string
	Pid  int

	env, args []string

	cmd *exec.Cmd
	dir string
	log *bytes.Buffer
}

// Start starts a server that lives as long as the test.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return StartEnv(t, nil, args...)
}

// StartEnv is Start with more of the environment, as "NAME=value".
func StartEnv(t testing.TB, env []string, args ...string) *Server {
	t.Helper()
	s, err := startMain(env, args)
	need(t, err)
	t.Cleanup(s.Close)
	return s
}

// need fails the test, or skips it if all that is wrong is a missing program and this is not CI.
func need(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ErrMissing) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// StartMain starts a server for a program that is not a test. The caller closes it.
func StartMain(args ...string) (*Server, error) { return startMain(nil, args) }

func startMain(env, args []string) (*Server, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, ErrMissing
	}
	for attempt := 0; ; attempt++ {
		s, err := start(program, freePort(), env, args)
		if err == nil || attempt == 5 { // somebody else may have taken the port
			return s, err
		}
	}
}

func start(program string, port int, env, args []string) (*Server, error) {
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return nil, err
	}
	s := &Server{Addr: "127.0.0.1:" + strconv.Itoa(port), env: env, args: args, dir: dir, log: new(bytes.Buffer)}
	s.cmd = exec.Command(program, append([]string{
		"--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "no",
		"--enable-debug-command", "local", "--daemonize", "no",
	}, args...)...)
	s.cmd.Env = append(os.Environ(), env...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	if err := s.cmd.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	s.Pid = s.cmd.Process.Pid
	client := redis.NewClient(&redis.Options{Addr: s.Addr})
	defer func() { _ = client.Close() }()
	ours := func() error {
		info, err := client.Info(context.Background(), "server").Result()
		if err == nil && !bytes.Contains([]byte(info), []byte("process_id:"+strconv.Itoa(s.Pid))) {
			return fmt.Errorf("port %d belongs to another server", port)
		}
		return err
	}
	if err := Poll(10*time.Second, ours); err != nil {
		s.Close()
		return nil, fmt.Errorf("redistest: server does not answer: %w; its log:\n%s", err, s.log)
	}
	return s, nil
}

// freePort is below the range of ephemeral ports, so that port + 10000 exists for a cluster's bus.
func freePort() int {
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		_ = l.Close()
		if port < 55_000 {
			return port
		}
	}
}

// Poll calls until it returns nil, every few milliseconds, and returns the last error after the limit.
func Poll(limit time.Duration, call func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := call()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Close kills the server, also one that is stopped, and removes its directory.
func (s *Server) Close() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	_ = os.RemoveAll(s.dir)
}

// Kill ends the server at once, also one that is stopped.
func (s *Server) Kill() error {
	s.Close()
	return nil
}

// Restart starts a server that was killed: on its old port, and empty.
func (s *Server) Restart() error {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return ErrMissing
	}
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		return err
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	again, err := start(program, number, s.env, s.args)
	if err != nil {
		return err
	}
	s.Pid, s.cmd, s.dir, s.log = again.Pid, again.cmd, again.dir, again.log
	return nil
}

// Stop makes the server hang (SIGSTOP) until Continue.
func (s *Server) Stop() error { return s.cmd.Process.Signal(syscall.SIGSTOP) }

// Continue ends Stop.
func (s *Server) Continue() error { return s.cmd.Process.Signal(syscall.SIGCONT) }

// Client returns a client that is closed with the test.
func (s *Server) Client(t testing.TB, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	opts := &redis.Options{Addr: s.Addr}
	for _, c := range change {
		c(opts)
	}
	client := redis.NewClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

var shared struct {
	sync.Mutex
	server *Server
	err    error
}

// Shared returns one server for all tests of the program. TestMain stops it with StopShared. Tests keep to keys of their
// own.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil && shared.err == nil {
		shared.server, shared.err = StartMain()
	}
	need(t, shared.err)
	return shared.server
}

// StopShared stops the shared server, if there is one.
func StopShared() {
	shared.Lock()
	defer shared.Unlock()
	if shared.server != nil {
		shared.server.Close()
		shared.server = nil
	}
}
