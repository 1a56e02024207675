package redistest

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Cluster is a running cluster of three masters with a replica each.
type Cluster struct {
	Addrs []string
	Nodes []*Server
}

// StartCluster starts a cluster for the duration of the test, and waits until every slot is served and every replica is in sync. Its node
// timeout is long, so that a busy machine causes no failover. [Cluster.ElectSoon] shortens it.
func StartCluster(t testing.TB) *Cluster {
	t.Helper()
	c := new(Cluster)
	for range 6 {
		node := Start(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0")
		c.Nodes = append(c.Nodes, node)
		c.Addrs = append(c.Addrs, node.Addr)
	}
	cli := Program(t, cliName())
	args := append(append([]string{"--cluster", "create"}, c.Addrs...), "--cluster-replicas", "1", "--cluster-yes")
	if out, err := exec.Command(cli, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", cli, args, err, out)
	}
	for _, node := range c.Nodes {
		client := node.Client(t)
		need(t, Poll(20*time.Second, func() error { return joined(client) }))
	}
	client := c.Client(t)
	need(t, Poll(10*time.Second, func() error {
		for i := range 50 {
			if err := client.Set(context.Background(), fmt.Sprint("redistest:", i), "", time.Second).Err(); err != nil {
				return err
			}
		}
		return nil
	}))
	c.configure(t, "cluster-node-timeout", "15000") // not earlier: with a long timeout nodes are slow to join
	return c
}

// ElectSoon makes the nodes fail over to a replica when its master has been silent for one second instead of fifteen.
func (c *Cluster) ElectSoon(t testing.TB) {
	t.Helper()
	c.configure(t, "cluster-node-timeout", "1000")
}

func (c *Cluster) configure(t testing.TB, option, value string) {
	t.Helper()
	for _, node := range c.Nodes {
		need(t, node.Client(t).ConfigSet(context.Background(), option, value).Err())
	}
}

// joined returns an error until a node has joined the cluster.
func joined(client *redis.Client) error {
	ctx := context.Background()
	info, err := client.ClusterInfo(ctx).Result()
	if err != nil {
		return err
	}
	role, err := client.Info(ctx, "replication").Result()
	if err != nil {
		return err
	}
	if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_known_nodes:6") {
		return fmt.Errorf("redistest: cluster is not up:\n%s", info)
	}
	if strings.Contains(role, "role:slave") && !strings.Contains(role, "master_link_status:up") {
		return fmt.Errorf("redistest: replica is not in sync:\n%s", role)
	}
	if strings.Contains(role, "role:master") && !strings.Contains(role, "connected_slaves:1") {
		return fmt.Errorf("redistest: master has no replica:\n%s", role)
	}
	return nil
}

// Client returns a client that is closed with the test.
func (c *Cluster) Client(t testing.TB, change ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	t.Helper()
	opts := &redis.ClusterOptions{Addrs: c.Addrs}
	for _, ch := range change {
		ch(opts)
	}
	client := redis.NewClusterClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	return client
}
