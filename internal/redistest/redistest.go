// Package redistest starts real redis-servers for tests, and proxies that do what a bad network does: each on a free port of
// 127.0.0.1; a server has a directory of its own and is stopped by its process. Where a program is not installed a test is
// skipped and says so, and Main tells at the end how many were; with CI=true it fails.
//
// TOKENBUCKET_REDIS_SERVER names the server to start, on the PATH or by its path; default redis-server. So suites run against
// Valkey: TOKENBUCKET_REDIS_SERVER=valkey-server go test ./...
package redistest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrMissing says that a program is not installed. What wraps it names the program.
var ErrMissing = errors.New("redistest: not installed")

// ServerEnv is the environment variable that names the server to start.
const ServerEnv = "TOKENBUCKET_REDIS_SERVER"

// serverName is the program that servers are started with.
func serverName() string {
	if name := os.Getenv(ServerEnv); name != "" {
		return name
	}
	return "redis-server"
}

// cliName is the server's program for the command line: redis-cli, valkey-cli.
func cliName() string { return strings.TrimSuffix(serverName(), "-server") + "-cli" }

// look finds a program.
func look(name string) (path string, err error) {
	if path, err = exec.LookPath(name); err != nil {
		return "", fmt.Errorf("%w: %s; on Debian: apt-get install %s", ErrMissing, name, strings.Replace(filepath.Base(name), "-cli", "-server", 1))
	}
	return path, nil
}

// Program finds a program that a test runs. Without it the test is skipped; with CI=true it fails.
func Program(t testing.TB, name string) (path string) {
	t.Helper()
	path, err := look(name)
	need(t, err)
	return path
}

// Server is a redis-server, or a sentinel, that can be killed and started again at its address, with nothing of what it knew.
// Its methods may be called by many goroutines at once.
type Server struct {
	Addr string
	Pid  int // another after Restart

	env, args []string
	conf      string

	mu  sync.Mutex
	cmd *exec.Cmd
	dir string // "": it does not run
	log *bytes.Buffer
}

// Start starts a server that lives as long as the test.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return StartWith(t, nil, "", args...)
}

// StartWith is Start with more of the environment, as "NAME=value", and with lines of configuration in a file that the server
// may rewrite, as a sentinel does.
func StartWith(t testing.TB, env []string, conf string, args ...string) *Server {
	t.Helper()
	s, err := startMain(&Server{env: env, conf: conf, args: args})
	need(t, err)
	t.Cleanup(s.Close)
	return s
}

// need fails the test, or skips it if all that is wrong is a missing program and this is not CI.
func need(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ErrMissing) && os.Getenv("CI") != "true" {
		skips.add(err)
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// StartMain starts a server for a program that is not a test. The caller closes it.
func StartMain(args ...string) (*Server, error) { return startMain(&Server{args: args}) }

func startMain(s *Server) (*Server, error) {
	for attempt := 0; ; attempt++ {
		s.Addr = freeAddr()
		err := s.Restart()
		if err == nil {
			return s, nil
		}
		if errors.Is(err, ErrMissing) || attempt == 5 { // somebody else may have taken the port
			return nil, err
		}
	}
}

// freeAddr is below the ports that Linux gives to connections by itself (from 32768), so that nobody gets it while its server
// is dead or its network down, and so is the port of a cluster's bus, 10000 higher; that one is never anybody's own.
func freeAddr() string {
	const least, bus = 12_000, 10_000
	for {
		port := least + rand.IntN(bus)
		if free(port) && free(port+bus) {
			return address(port)
		}
	}
}

func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func free(port int) bool {
	l, err := net.Listen("tcp", address(port))
	if err == nil {
		_ = l.Close()
	}
	return err == nil
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

// Restart starts a server that was killed: on its old port, in a new directory, and empty; one that runs is killed before. It
// returns when the server answers.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
	program, err := look(serverName())
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return err
	}
	args := append([]string{
		"--port", port, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "no",
		"--enable-debug-command", "local", "--daemonize", "no",
	}, s.args...)
	if s.conf != "" {
		file := filepath.Join(dir, "redis.conf")
		if err := os.WriteFile(file, []byte(s.conf), 0o600); err != nil {
			_ = os.RemoveAll(dir)
			return err
		}
		args = append([]string{file}, args...)
	}
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), s.env...)
	s.log = new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	if err := cmd.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return err
	}
	s.cmd, s.dir, s.Pid = cmd, dir, cmd.Process.Pid
	client := redis.NewClient(&redis.Options{Addr: s.Addr})
	defer func() { _ = client.Close() }()
	err = Poll(10*time.Second, func() error {
		conn, err := net.Dial("tcp", s.Addr) // the client would log that nobody answers yet, and try again later
		if err != nil {
			return err
		}
		_ = conn.Close()
		info, err := client.Info(context.Background(), "server").Result()
		if err == nil && !strings.Contains(info, fmt.Sprintf("process_id:%d\r", s.Pid)) {
			return fmt.Errorf("%s belongs to another server", s.Addr)
		}
		return err
	})
	if err != nil {
		s.end()
		return fmt.Errorf("redistest: %v does not answer: %w; its log:\n%s", cmd.Args, err, s.log)
	}
	return nil
}

// Close kills the server, also one that is stopped, and removes its directory.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
}

// end holds mu.
func (s *Server) end() {
	if s.dir == "" {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	_ = os.RemoveAll(s.dir)
	s.dir = ""
}

// Kill is Close, as a fault that Restart ends. Killing it twice does nothing.
func (s *Server) Kill() error {
	s.Close()
	return nil
}

// Stop makes the server hang (SIGSTOP) until Continue.
func (s *Server) Stop() error { return s.signal(syscall.SIGSTOP) }

// Continue ends Stop.
func (s *Server) Continue() error { return s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig os.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd.Process.Signal(sig)
}

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

// Shared returns one server for all tests of the program. TestMain stops it with Main or StopShared. Tests keep to keys of their
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
