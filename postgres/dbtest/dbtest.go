// Package dbtest starts MariaDB and PostgreSQL servers for tests: each on a free port of 127.0.0.1, with a directory of its own, stopped by
// its process. If the programs are not installed, a test is skipped with that reason; with CI=true it fails. The package depends on no
// drivers. It serves the tests of this repository's modules, and its API may change.
package dbtest

import (
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
)

// ErrMissing means that a program is not installed.
var ErrMissing = errors.New("dbtest: a program is not installed")

// Server is a running database server.
type Server struct {
	// Addr is 127.0.0.1 and the port.
	Addr string
	Port int
	// Pid of the server's first process, since its last start.
	Pid int

	kind kind
	args []string // from the test
	dir  string
	cmd  *exec.Cmd
	dead chan struct{} // closed when cmd has ended
}

// kind is the difference between MariaDB and PostgreSQL.
type kind interface {
	// install creates the data directory, dir/data.
	install(dir string) error
	// command returns the command that starts a server on it.
	command(dir string, port int) (*exec.Cmd, error)
	// ready is the line in the log that shows that the server has its port.
	ready() string
	dsn(addr string) string
	// quit is the signal that shuts the server down at once, but cleanly.
	quit() syscall.Signal
	// swept removes the files and memory outside of its directory that a killed server leaves.
	swept(dir string)
}

// MariaDB starts a server that lives as long as the test; args are those of mariadbd.
func MariaDB(t testing.TB, args ...string) *Server { t.Helper(); return tested(t, mariaDB{}, args) }

// PostgreSQL starts a server that lives as long as the test; args are those of postgres.
func PostgreSQL(t testing.TB, args ...string) *Server {
	t.Helper()
	return tested(t, postgreSQL{}, args)
}

// StartMariaDB starts a server for a program that is not a test. The caller closes it.
func StartMariaDB(args ...string) (*Server, error) { return start(mariaDB{}, args) }

// StartPostgreSQL starts a server for a program that is not a test. The caller closes it.
func StartPostgreSQL(args ...string) (*Server, error) { return start(postgreSQL{}, args) }

func tested(t testing.TB, k kind, args []string) *Server {
	t.Helper()
	s, err := start(k, args)
	need(t, err)
	t.Cleanup(s.Close)
	return s
}

// need fails the test, or skips it if the only fault is a missing program and this is not CI.
func need(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ErrMissing) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func start(k kind, args []string) (*Server, error) {
	dir, err := os.MkdirTemp("", "dbtest")
	if err != nil {
		return nil, err
	}
	s := &Server{kind: k, args: args, dir: dir}
	if err := k.install(dir); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	for attempt := 0; ; attempt++ {
		if s.Port, err = freePort(); err == nil {
			s.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port))
			err = s.run()
		}
		if err == nil {
			return s, nil
		}
		if attempt == 5 { // another process may have taken the port
			s.Close()
			return nil, err
		}
	}
}

// freePort returns a free port below the ephemeral ports of Linux (from 32768), so no connection takes the port while the server is down.
func freePort() (int, error) {
	const least, ports = 32_000, 768
	var last error
	for range ports {
		port := least + rand.IntN(ports)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return port, l.Close()
		}
		last = err
	}
	return 0, last
}

// run starts the process and waits until it has its port.
func (s *Server) run() error {
	logged := filepath.Join(s.dir, "log")
	log, err := os.Create(logged)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd, err := s.kind.command(s.dir, s.Port)
	if err != nil {
		return err
	}
	cmd.Args = append(cmd.Args, s.args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	dead := make(chan struct{})
	go func() { _ = cmd.Wait(); close(dead) }()
	s.cmd, s.Pid, s.dead = cmd, cmd.Process.Pid, dead
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		text, err := os.ReadFile(logged)
		if err == nil && strings.Contains(string(text), s.kind.ready()) {
			return nil
		}
		select {
		case <-dead:
			return fmt.Errorf("dbtest: %s ended; its log:\n%s", cmd.Path, text)
		default:
		}
		if time.Now().After(deadline) {
			s.Kill()
			return fmt.Errorf("dbtest: %s is not ready; its log:\n%s", cmd.Path, text)
		}
	}
}

// DSN returns the server's address with user and database, in the form of its usual Go driver: root@tcp(address)/test for MariaDB, a URL
// for PostgreSQL. Both end in parameters, so that "&name=value" may be appended.
func (s *Server) DSN() string { return s.kind.dsn(s.Addr) }

// Stop stops all processes of the server (SIGSTOP) until Continue. Windows has no such signal: there it returns an error.
func (s *Server) Stop() error { return s.signal(stopped) }

// Continue ends Stop.
func (s *Server) Continue() error { return s.signal(continued) }

// Kill ends the server as a crash does (SIGKILL), even if it is stopped.
func (s *Server) Kill() {
	_ = s.signal(syscall.SIGKILL)
	<-s.dead
}

// Restart starts the server again, with the same data on the same port. If it runs, it is killed first.
func (s *Server) Restart() error {
	s.Kill()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := s.run() // children of a PostgreSQL that was killed may live on for a moment
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// Close ends the server, even if it is stopped, and removes its directory.
func (s *Server) Close() {
	if s.cmd != nil {
		_ = s.signal(s.kind.quit())
		_ = s.signal(continued)
		select {
		case <-s.dead:
		case <-time.After(10 * time.Second):
			s.Kill()
		}
		s.kind.swept(s.dir)
	}
	_ = os.RemoveAll(s.dir)
}

// signal signals the first process before its children, so that it starts no more of them meanwhile.
func (s *Server) signal(sig syscall.Signal) error {
	children := childrenOf(s.Pid)
	if err := s.cmd.Process.Signal(sig); err != nil {
		return err
	}
	if sig == s.kind.quit() {
		return nil // the server signals its children itself
	}
	if sig == stopped {
		children = childrenOf(s.Pid)
	}
	for _, pid := range children {
		_ = kill(pid, sig) // it may have ended
	}
	return nil
}

// childrenOf runs ps, which every Unix has. PostgreSQL's children are sessions of their own, so no process group contains them all.
func childrenOf(pid int) (children []int) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) == 2 && f[1] == strconv.Itoa(pid) {
			child, _ := strconv.Atoi(f[0])
			children = append(children, child)
		}
	}
	return children
}

var shared struct {
	sync.Mutex
	servers map[kind]*Server
	errs    map[kind]error
}

// SharedMariaDB returns one server for all tests of the program. TestMain must stop it with StopShared. Tests use tables of their own.
func SharedMariaDB(t testing.TB) *Server { t.Helper(); return sharedServer(t, mariaDB{}) }

// SharedPostgreSQL is SharedMariaDB for PostgreSQL.
func SharedPostgreSQL(t testing.TB) *Server { t.Helper(); return sharedServer(t, postgreSQL{}) }

func sharedServer(t testing.TB, k kind) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.servers == nil {
		shared.servers, shared.errs = make(map[kind]*Server), make(map[kind]error)
	}
	if shared.servers[k] == nil && shared.errs[k] == nil {
		shared.servers[k], shared.errs[k] = start(k, nil)
	}
	need(t, shared.errs[k])
	return shared.servers[k]
}

// StopShared stops the shared servers that were started.
func StopShared() {
	shared.Lock()
	defer shared.Unlock()
	for k, s := range shared.servers {
		if s != nil {
			s.Close()
		}
		delete(shared.servers, k)
	}
}

// program returns the path of a program, from PATH or one of the other places, of which the last in order comes first.
func program(name, advice string, elsewhere ...string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, pattern := range elsewhere {
		if found, _ := filepath.Glob(filepath.Join(pattern, name)); len(found) > 0 {
			return found[len(found)-1], nil
		}
	}
	return "", fmt.Errorf("%w: %s; on Debian: apt-get install %s", ErrMissing, name, advice)
}
