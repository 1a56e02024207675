// Package dbtest starts real MariaDB and PostgreSQL servers for tests: each on a free port of 127.0.0.1, with a directory
// of its own, stopped by its process. Where the programs are not installed a test is skipped and says so; with CI=true it
// fails. It knows no drivers. It is for the tests of this repository's modules, and promises nobody else anything.
package dbtest

import (
	"errors"
	"fmt"
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

// ErrMissing says that a program is not installed.
var ErrMissing = errors.New("dbtest: a program is not installed")

// Server is a running database server.
type Server struct {
	// Addr is 127.0.0.1 and the port.
	Addr string
	Port int
	// Pid of the server's (first) process, of the present life.
	Pid int

	kind kind
	args []string // of the test
	dir  string
	cmd  *exec.Cmd
	dead chan struct{} // closed when cmd has ended
}

// kind is what differs between MariaDB and PostgreSQL.
type kind interface {
	// install creates the data directory, dir/data.
	install(dir string) error
	// command starts a server on it.
	command(dir string, port int) (*exec.Cmd, error)
	// ready is what the log says once the port is the server's own.
	ready() string
	dsn(addr string) string
	// quit ends the server in order, but at once.
	quit() syscall.Signal
	// swept removes what a killed server has left outside of its directory.
	swept(dir string)
}

// MariaDB starts a server that lives as long as the test; args are mariadbd's.
func MariaDB(t testing.TB, args ...string) *Server { t.Helper(); return tested(t, mariaDB{}, args) }

// PostgreSQL starts a server that lives as long as the test; args are postgres'.
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
		if attempt == 5 { // somebody else may have taken the port
			s.Close()
			return nil, err
		}
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// run starts the process and waits until the port is its own.
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

// DSN is the server's address with user and database, in the form of its usual Go driver: root@tcp(address)/test for
// MariaDB, a URL for PostgreSQL. Both end in parameters, so that "&name=value" may be appended.
func (s *Server) DSN() string { return s.kind.dsn(s.Addr) }

// Stop makes the server hang (SIGSTOP), all its processes, until Continue.
func (s *Server) Stop() error { return s.signal(syscall.SIGSTOP) }

// Continue ends Stop.
func (s *Server) Continue() error { return s.signal(syscall.SIGCONT) }

// Kill ends the server as a crash does (SIGKILL), also one that is stopped.
func (s *Server) Kill() {
	_ = s.signal(syscall.SIGKILL)
	<-s.dead
}

// Restart starts a server that was killed again, with the same data on the same port; one that runs is killed before.
func (s *Server) Restart() error {
	s.Kill()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := s.run() // children of a PostgreSQL that was killed may live on for a moment
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// Close ends the server, also one that is stopped, and removes its directory.
func (s *Server) Close() {
	if s.cmd != nil {
		_ = s.signal(s.kind.quit())
		_ = s.signal(syscall.SIGCONT)
		select {
		case <-s.dead:
		case <-time.After(10 * time.Second):
			s.Kill()
		}
		s.kind.swept(s.dir)
	}
	_ = os.RemoveAll(s.dir)
}

// signal reaches the first process before its children, so that it starts no more of them meanwhile.
func (s *Server) signal(sig syscall.Signal) error {
	children := childrenOf(s.Pid)
	if err := s.cmd.Process.Signal(sig); err != nil {
		return err
	}
	if sig == s.kind.quit() {
		return nil // which it tells its children itself
	}
	if sig == syscall.SIGSTOP {
		children = childrenOf(s.Pid)
	}
	for _, pid := range children {
		_ = syscall.Kill(pid, sig) // it may have ended
	}
	return nil
}

// childrenOf asks ps, which every Unix has. PostgreSQL's children are sessions of their own: no group holds them all.
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

// SharedMariaDB returns one server for all tests of the program. TestMain stops it with StopShared. Tests keep to tables of
// their own.
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

// StopShared stops the shared servers that there are.
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

// program finds a program in PATH or in the other places, the last in order first.
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
