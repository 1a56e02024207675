package faultlab

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

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Node is a redis-server, or a sentinel, that can be killed and started again at its address, with nothing of what it knew.
// Its methods may be called by many goroutines at once.
type Node struct {
	Addr string

	args []string
	conf string // of a sentinel; "": none

	mu  sync.Mutex
	cmd *exec.Cmd
	dir string
	log *bytes.Buffer
}

// StartNode starts a redis-server with arguments that lives as long as the test.
func StartNode(t testing.TB, args ...string) *Node {
	t.Helper()
	return startNode(t, &Node{args: args})
}

func startNode(t testing.TB, n *Node) *Node {
	t.Helper()
	for attempt := 0; ; attempt++ {
		n.Addr = freeAddr()
		err := n.start()
		if err == nil {
			t.Cleanup(n.Kill)
			return n
		}
		if errors.Is(err, redistest.ErrMissing) && os.Getenv("CI") != "true" {
			t.Skip(err)
		}
		if errors.Is(err, redistest.ErrMissing) || attempt == 5 { // somebody else may have taken the port
			t.Fatal(err)
		}
	}
}

// freeAddr is below the ports that systems give to connections, so that nobody takes it while its server is dead.
func freeAddr() string {
	for {
		addr := "127.0.0.1:" + strconv.Itoa(10_000+rand.IntN(22_000))
		if l, err := net.Listen("tcp", addr); err == nil {
			_ = l.Close()
			return addr
		}
	}
}

// Restart starts a node that was killed, in a new directory, and returns when it answers.
func (n *Node) Restart(t testing.TB) {
	t.Helper()
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
}

func (n *Node) start() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return redistest.ErrMissing
	}
	dir, err := os.MkdirTemp("", "faultlab")
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(n.Addr)
	args := append([]string{"--port", port, "--bind", "127.0.0.1", "--dir", dir, "--daemonize", "no"}, n.args...)
	if n.conf == "" {
		args = append([]string{"--save", "", "--appendonly", "no", "--enable-debug-command", "local"}, args...)
	} else {
		file := filepath.Join(dir, "sentinel.conf") // which the sentinel rewrites
		if err := os.WriteFile(file, []byte(n.conf), 0o600); err != nil {
			_ = os.RemoveAll(dir)
			return err
		}
		args = append([]string{file, "--sentinel"}, args...)
	}
	n.log = new(bytes.Buffer)
	n.cmd, n.dir = exec.Command(program, args...), dir
	n.cmd.Stdout, n.cmd.Stderr = n.log, n.log
	if err := n.cmd.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return err
	}
	client := redis.NewClient(&redis.Options{Addr: n.Addr, DialerRetries: 1})
	defer func() { _ = client.Close() }()
	err = redistest.Poll(10*time.Second, func() error {
		info, err := client.Info(context.Background(), "server").Result()
		if err == nil && !strings.Contains(info, fmt.Sprintf("process_id:%d\r", n.cmd.Process.Pid)) {
			return fmt.Errorf("%s belongs to another server", n.Addr)
		}
		return err
	})
	if err != nil {
		n.end()
		return fmt.Errorf("faultlab: %v does not answer: %w; its log:\n%s", n.cmd.Args, err, n.log)
	}
	return nil
}

// Kill ends the node at once, as kill -9 does, also one that is stopped. Killing it twice does nothing.
func (n *Node) Kill() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.end()
}

// end holds mu.
func (n *Node) end() {
	if n.dir == "" {
		return
	}
	_ = n.cmd.Process.Kill()
	_ = n.cmd.Wait()
	_ = os.RemoveAll(n.dir)
	n.dir = ""
}

// Stop makes the node hang (SIGSTOP) until Continue.
func (n *Node) Stop() error { return n.signal(syscall.SIGSTOP) }

// Continue ends Stop.
func (n *Node) Continue() error { return n.signal(syscall.SIGCONT) }

func (n *Node) signal(s os.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cmd.Process.Signal(s)
}

// Client returns a client of this node that is closed with the test.
func (n *Node) Client(t testing.TB, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	opts := &redis.Options{Addr: n.Addr}
	for _, c := range change {
		c(opts)
	}
	client := redis.NewClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// InStep waits, at most ten seconds, until the node is a replica that has received all that its master has written.
//
// A new replica is up to date at once, but hears of further writes only after its first acknowledgement, up to a second later:
// hence a message that is replicated, and leaves nothing behind.
func (n *Node) InStep(t testing.TB, master *Node) {
	t.Helper()
	ctx := context.Background()
	of, own := master.Client(t), n.Client(t)
	if err := of.Publish(ctx, "faultlab", n.Addr).Err(); err != nil {
		t.Fatal(err)
	}
	err := redistest.Poll(10*time.Second, func() error {
		there, err := of.Info(ctx, "replication").Result()
		if err != nil {
			return err
		}
		here, err := own.Info(ctx, "replication").Result()
		if err != nil {
			return err
		}
		if !strings.Contains(here, "master_link_status:up") {
			return fmt.Errorf("faultlab: %s is not connected to its master:\n%s", n.Addr, here)
		}
		if want, got := field(there, "master_repl_offset"), field(here, "slave_repl_offset"); got < want {
			return fmt.Errorf("faultlab: %s is at offset %d of %d", n.Addr, got, want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// field returns a number of an answer to INFO; -1 if it is missing.
func field(info, name string) int64 {
	_, rest, found := strings.Cut(info, "\n"+name+":")
	text, _, _ := strings.Cut(rest, "\r")
	n, err := strconv.ParseInt(text, 10, 64)
	if !found || err != nil {
		return -1
	}
	return n
}

// Sentinel is a master, its replicas, and three sentinels that replace the master half a second after it was heard last.
type Sentinel struct {
	// Name of the master.
	Name string
	// Master as it was at first; after a failover it is one of the replicas. See Current.
	Master    *Node
	Replicas  []*Node
	Sentinels []*Node
	// Addrs of the sentinels.
	Addrs []string
}

// sentinelConf is written for a sentinel: two of three must agree that the master is down.
const sentinelConf = `sentinel monitor %[1]s %[2]s %[3]s 2
sentinel down-after-milliseconds %[1]s 500
sentinel failover-timeout %[1]s 3000
sentinel parallel-syncs %[1]s 1
`

// StartSentinel starts the servers, with arguments for all of them, and waits until replicas are in step and the sentinels know
// of them and of each other. They live as long as the test.
func StartSentinel(t testing.TB, replicas int, args ...string) *Sentinel {
	t.Helper()
	s := &Sentinel{Name: "main"}
	args = append([]string{"--repl-diskless-sync-delay", "0"}, args...)
	s.Master = StartNode(t, args...)
	host, port, _ := net.SplitHostPort(s.Master.Addr)
	for range replicas {
		s.Replicas = append(s.Replicas, StartNode(t, append([]string{"--replicaof", host + " " + port}, args...)...))
	}
	for _, r := range s.Replicas {
		r.InStep(t, s.Master)
	}
	for range 3 {
		n := startNode(t, &Node{conf: fmt.Sprintf(sentinelConf, s.Name, host, port)})
		s.Sentinels = append(s.Sentinels, n)
		s.Addrs = append(s.Addrs, n.Addr)
	}
	for _, n := range s.Sentinels {
		client := redis.NewSentinelClient(&redis.Options{Addr: n.Addr})
		err := redistest.Poll(20*time.Second, func() error { return s.knows(client) })
		_ = client.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// knows tells what a sentinel has still to find out.
func (s *Sentinel) knows(client *redis.SentinelClient) error {
	m, err := client.Master(context.Background(), s.Name).Result()
	if err != nil {
		return err
	}
	if m["flags"] != "master" || m["num-slaves"] != strconv.Itoa(len(s.Replicas)) || m["num-other-sentinels"] != "2" {
		return fmt.Errorf("faultlab: sentinel knows of %s replicas and %s other sentinels; master is %q", m["num-slaves"], m["num-other-sentinels"], m["flags"])
	}
	return nil
}

// Current returns the node that most of the sentinels call the master; nil while they do not agree.
func (s *Sentinel) Current() *Node {
	votes := map[string]int{}
	for _, addr := range s.Addrs {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		client := redis.NewSentinelClient(&redis.Options{Addr: addr, DialerRetries: 1, MaxRetries: -1})
		if at, err := client.GetMasterAddrByName(ctx, s.Name).Result(); err == nil && len(at) == 2 {
			votes[net.JoinHostPort(at[0], at[1])]++
		}
		_ = client.Close()
		cancel()
	}
	for _, n := range append([]*Node{s.Master}, s.Replicas...) {
		if votes[n.Addr] >= 2 {
			return n
		}
	}
	return nil
}

// AwaitFailover waits until the sentinels agree on a master other than the one that was, and returns it.
func (s *Sentinel) AwaitFailover(t testing.TB, was *Node) *Node {
	t.Helper()
	var now *Node
	err := redistest.Poll(30*time.Second, func() error {
		if now = s.Current(); now == nil || now == was {
			return errors.New("faultlab: the sentinels have not replaced the master")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return now
}

// Client returns a client that asks the sentinels where the master is. It is closed with the test.
func (s *Sentinel) Client(t testing.TB, change ...func(*redis.FailoverOptions)) *redis.Client {
	t.Helper()
	opts := &redis.FailoverOptions{MasterName: s.Name, SentinelAddrs: s.Addrs}
	for _, c := range change {
		c(opts)
	}
	client := redis.NewFailoverClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	return client
}
