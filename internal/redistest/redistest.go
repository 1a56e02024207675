// Package redistest starts real redis-servers for tests, and proxies that simulate network faults. Each has a free port of 127.0.0.1, and each
// server has a separate directory. A test that needs a program that is not installed is skipped, and Main prints the number of skipped tests.
// With CI=true such a test fails instead.
//
// TOKENBUCKET_REDIS_SERVER is the name or path of the server to start, by default redis-server. To run the tests with Valkey:
// TOKENBUCKET_REDIS_SERVER=valkey-server go test ./...
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
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrMissing means that a program is not installed. Errors that wrap it name the program.
var ErrMissing = errors.New("redistest: not installed")

// ServerEnv is the environment variable that names the server to start.
const ServerEnv = "TOKENBUCKET_REDIS_SERVER"

// serverName returns the name of the server's program.
func serverName() string {
	if name := os.Getenv(ServerEnv); name != "" {
		return name
	}
	return "redis-server"
}

// cliName returns the name of the server's command-line client: redis-cli or valkey-cli.
func cliName() string { return strings.TrimSuffix(serverName(), "-server") + "-cli" }

// look returns the path of a program.
func look(name string) (path string, err error) {
	if path, err = exec.LookPath(name); err != nil {
		return "", fmt.Errorf("%w: %s; on Debian: apt-get install %s", ErrMissing, name, strings.Replace(filepath.Base(name), "-cli", "-server", 1))
	}
	return path, nil
}

// Program returns the path of a program. If it is not installed, the test is skipped, or fails with CI=true.
func Program(t testing.TB, name string) (path string) {
	t.Helper()
	path, err := look(name)
	need(t, err)
	return path
}

// Server is a redis-server or a sentinel that can be killed and restarted, empty, at the same address. Its methods are safe for concurrent
// use.
type Server struct {
	Addr string
	Pid  int // changes with Restart

	env, args []string
	conf      string

	mu  sync.Mutex
	cmd *exec.Cmd
	dir string // empty while the server is not running
	log *bytes.Buffer
}

// Start starts a server for the duration of the test.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return StartWith(t, nil, "", args...)
}

// StartWith is Start with additional environment variables ("NAME=value") and a configuration file, which the server may rewrite, as a
// sentinel does.
func StartWith(t testing.TB, env []string, conf string, args ...string) *Server {
	t.Helper()
	s, err := startMain(&Server{env: env, conf: conf, args: args})
	need(t, err)
	t.Cleanup(s.Close)
	return s
}

// need fails the test if err is not nil. For a missing program it skips the test, except with CI=true.
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

// StartMain starts a server outside of a test. The caller must close it.
func StartMain(args ...string) (*Server, error) { return startMain(&Server{args: args}) }

func startMain(s *Server) (*Server, error) {
	for attempt := 0; ; attempt++ {
		s.Addr = FreeAddr()
		err := s.Restart()
		if err == nil {
			return s, nil
		}
		if errors.Is(err, ErrMissing) || attempt == 5 { // another program may have taken the port
			return nil, err
		}
	}
}

// FreeAddr returns a free address. Its port and that of the cluster bus, 10000 higher, are below the ephemeral ports of Linux (from 32768).
// So no connection takes the port while the server is dead or the network is down. No server's port is another one's bus port.
func FreeAddr() string {
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

// Poll repeats a call every few milliseconds until it returns nil. After the limit it returns the last error.
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

// Restart kills the server if it is running and starts it again on the same port, empty, in a new directory. It returns when the server
// replies.
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
		conn, err := net.Dial("tcp", s.Addr) // without this, the client would log the failure and retry later
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
		return fmt.Errorf("redistest: no reply from %v: %w; its log:\n%s", cmd.Args, err, s.log)
	}
	return nil
}

// Close kills the server, even a stopped one, and removes its directory.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
}

// end kills the server. s.mu must be held.
func (s *Server) end() {
	if s.dir == "" {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	_ = os.RemoveAll(s.dir)
	s.dir = ""
}

// Kill is Close as a fault that Restart ends. A second Kill has no effect.
func (s *Server) Kill() error {
	s.Close()
	return nil
}

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

// Shared returns one server for all tests of the program. TestMain must stop it by Main or StopShared. Each test must use its own keys.
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
