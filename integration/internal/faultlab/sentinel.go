package faultlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Node is a server that fails the test by itself, and may be a replica.
type Node struct{ *redistest.Server }

// StartNode starts a redis-server with arguments that lives as long as the test.
func StartNode(t testing.TB, args ...string) *Node {
	t.Helper()
	return &Node{redistest.Start(t, args...)}
}

// Restart starts a killed node, in a new directory, and returns when it replies.
func (n *Node) Restart(t testing.TB) {
	t.Helper()
	if err := n.Server.Restart(); err != nil {
		t.Fatal(err)
	}
}

// InStep waits, at most ten seconds, until the node is a replica that has received all that its master has written.
//
// A new replica is up to date at once, but receives further writes only after its first acknowledgement, up to a second later:
// hence a message that is replicated and changes no data.
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

// field returns a number in a reply to INFO; -1 if it is missing.
func field(info, name string) int64 {
	_, rest, found := strings.Cut(info, "\n"+name+":")
	text, _, _ := strings.Cut(rest, "\r")
	n, err := strconv.ParseInt(text, 10, 64)
	if !found || err != nil {
		return -1
	}
	return n
}

// Sentinel is a master, its replicas, and three sentinels that replace the master: see ReplaceSoon.
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
sentinel down-after-milliseconds %[1]s 60000
sentinel failover-timeout %[1]s 3000
sentinel parallel-syncs %[1]s 1
`

// StartSentinel starts the servers, with arguments for all of them, and waits until replicas are in step and the sentinels know
// of them and of each other. They live as long as the test. They replace no master that a busy machine silences for a second or ten.
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
		n := &Node{redistest.StartWith(t, nil, fmt.Sprintf(sentinelConf, s.Name, host, port), "--sentinel")}
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

// ReplaceSoon makes the sentinels replace a master half a second after its last sign of life.
func (s *Sentinel) ReplaceSoon(t testing.TB) {
	t.Helper()
	for _, n := range s.Sentinels {
		client := redis.NewSentinelClient(&redis.Options{Addr: n.Addr})
		err := client.Set(context.Background(), s.Name, "down-after-milliseconds", "500").Err()
		_ = client.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// knows returns an error until a sentinel has discovered all replicas and the other sentinels.
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

// Current returns the node that most of the sentinels consider the master; nil while they do not agree.
func (s *Sentinel) Current() *Node {
	votes := map[string]int{}
	for _, addr := range s.Addrs {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
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

// AwaitFailover waits until the sentinels agree on a master other than the one that was, and returns it. A sentinel whose machine stood
// still for two seconds does nothing for thirty.
func (s *Sentinel) AwaitFailover(t testing.TB, was *Node) *Node {
	t.Helper()
	var now *Node
	err := redistest.Poll(2*time.Minute, func() error {
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
