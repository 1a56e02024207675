package state

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// master is one of a cluster's masters and the slots that it serves.
type master struct {
	*redistest.Server
	id          string
	first, last int
}

// masters of a fresh cluster, in the order of their slots.
func masters(t *testing.T, cluster *redistest.Cluster) []master {
	t.Helper()
	client := cluster.Nodes[0].Client(t)
	var all []master
	require.NoError(t, redistest.Poll(20*time.Second, func() error { // until this node knows all others
		all = nil
		shards, err := client.ClusterShards(background).Result()
		if err != nil {
			return err
		}
		for _, s := range shards {
			for _, n := range s.Nodes {
				for _, node := range cluster.Nodes {
					if n.Role == "master" && len(s.Slots) > 0 && node.Addr == net.JoinHostPort(n.IP, strconv.FormatInt(n.Port, 10)) {
						all = append(all, master{node, n.ID, int(s.Slots[0].Start), int(s.Slots[0].End)})
					}
				}
			}
		}
		if len(all) != 3 {
			return fmt.Errorf("%d masters", len(all))
		}
		return nil
	}))
	slices.SortFunc(all, func(a, b master) int { return a.first - b.first })
	return all
}

// nameIn returns the name of a bucket that lives in one of the slots.
func nameIn(t *testing.T, client *redis.Client, name string, first, last int) string {
	t.Helper()
	for i := 0; ; i++ {
		try := fmt.Sprint(name, "-", i)
		slot, err := client.ClusterKeySlot(background, key(try)).Result()
		require.NoError(t, err)
		if int(slot) >= first && int(slot) <= last {
			return try
		}
	}
}

func watchAll(t *testing.T, cluster *redistest.Cluster) *ledger {
	books := newLedger()
	for _, addr := range cluster.Addrs {
		books.watch(t, addr)
	}
	return books
}

// D7: a master of a cluster is killed and its replica takes over. Permits come again soon after, with a client's default
// options too, though it looks at the cluster's layout but once a minute.
func TestD7ClusterFailover(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	cluster.ElectSoon(t)
	books, late := watchAll(t, cluster), faultlab.MeasureLateness(t)
	victim := masters(t, cluster)[0]
	node := victim.Client(t)
	reload := func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval = time.Second }
	var fleets []*fleet
	before, during := 0, 0
	for _, kind := range faultlab.Kinds {
		for name, change := range map[string][]func(*redis.ClusterOptions){"default": nil, "reload-1s": {reload}} {
			name = nameIn(t, node, kind+"-"+name, victim.first, victim.last)
			fleets = append(fleets, startNamed(t, name, kind, storeTimeout, cluster.Client(t, change...), cluster.Client(t, change...)))
		}
	}
	for _, f := range fleets {
		f.awaitGrants(t, 100)
		before += 100
		during -= int(f.calls.Load())
	}
	victim.Close()
	killed := time.Now()
	for _, f := range fleets {
		first := settled + f.after(t, killed.Add(settled), 30*time.Second)
		faultlab.Figure(t, "first permit after the kill", first)
		assert.LessOrEqual(t, first, 12*time.Second+20*late.Most(), "%s: two elections, should the first fail on a slow machine", f.name)
		during += int(f.calls.Load())
		f.awaitGrants(t, 100)
	}
	faultlab.Bit(t, before, during)
	for _, f := range fleets {
		a := f.check(t, books, late, false, true)
		faultlab.Figure(t, "permits that the new master had not heard of", a.forkedSince(0))
		assert.LessOrEqual(t, float64(a.forkedSince(0)), permitsIn(time.Second)+burst)
		assert.Empty(t, a.gained)
	}
	faultlab.CleanUp(t, cluster.Client(t), "tokenbucket:")
}

// told counts the errors in the replies of servers, by their first word.
func told(t *testing.T, nodes ...*redis.Client) map[string]int {
	t.Helper()
	sum := map[string]int{}
	for _, node := range nodes {
		stats, err := node.Info(background, "errorstats").Result()
		require.NoError(t, err)
		for line := range strings.Lines(stats) {
			word, count, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "errorstat_"), ":count=")
			if n, err := strconv.Atoi(count); ok && err == nil {
				sum[word] += n
			}
		}
	}
	return sum
}

// D8: the buckets' slots move from one master to another and back, under load. Nobody notices, each batch is executed once, and
// the bound is that of a server that stays.
func TestD8SlotMigration(t *testing.T) {
	t.Parallel()
	cli, err := exec.LookPath("redis-cli")
	require.NoError(t, err) // the cluster has needed it too
	cluster := redistest.StartCluster(t)
	books, late := watchAll(t, cluster), faultlab.MeasureLateness(t)
	ms := masters(t, cluster)
	var nodes []*redis.Client
	for _, n := range cluster.Nodes {
		nodes = append(nodes, n.Client(t))
	}
	const slots = 30 // the lowest, which move first, to the second master and back
	var fleets []*fleet
	for _, kind := range faultlab.Kinds {
		name := nameIn(t, nodes[0], kind, ms[0].first, ms[0].first+slots-1)
		fleets = append(fleets, startNamed(t, name, kind, patient, cluster.Client(t), cluster.Client(t)))
	}
	before := 0
	for _, f := range fleets {
		f.awaitGrants(t, 100)
		before += 100
	}
	were := told(t, nodes...)
	more := func(word string) int { return told(t, nodes...)[word] - were[word] }
	moves := 0
	// MOVED is said after a move, too: only the others show a call in the middle of one.
	within := func() int { return more("ASK") + more("TRYAGAIN") }
	for began, least := time.Now(), faultlab.Lasting(6*time.Second, 60*time.Second); time.Since(began) < least ||
		within() == 0 && time.Since(began) < least+30*time.Second; moves++ {
		from, to := ms[moves%2], ms[(moves+1)%2]
		require.NoError(t, redistest.Poll(60*time.Second, func() error { // the nodes exchange the last move after it has ended
			out, err := exec.CommandContext(background, cli, "--cluster", "check", from.Addr).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}))
		ctx, cancel := context.WithTimeout(background, 60*time.Second)
		out, err := exec.CommandContext(ctx, cli, "--cluster", "reshard", from.Addr, "--cluster-from", from.id, "--cluster-to", to.id,
			"--cluster-slots", strconv.Itoa(slots), "--cluster-yes").CombinedOutput()
		cancel()
		require.NoError(t, err, "%s", out)
		for _, f := range fleets {
			f.awaitGrants(t, 20)
		}
		for _, f := range fleets {
			owner, err := to.Client(t).Exists(background, key(f.name)).Result()
			require.NoError(t, err)
			require.EqualValues(t, 1, owner, "%s has moved", f.name)
		}
	}
	faultlab.Figure(t, "moves", moves)
	t.Logf("%d moves: %d × ASK, %d × MOVED, %d × TRYAGAIN", moves, more("ASK"), more("MOVED"), more("TRYAGAIN"))
	faultlab.Bit(t, before, within())
	for _, f := range fleets {
		a := f.check(t, books, late, true, false)
		f.unnoticed(t, late)
		assert.Zero(t, a.extra())
		if late.Most() < 50*time.Millisecond && len(f.failed) == 0 { // a caller that was woken late asks again, and lets the first permit lapse
			assert.Equal(t, len(a.due), len(f.used), "each permit that was taken has reached its caller")
		} else {
			t.Logf("%s: whether each permit that was taken has reached its caller cannot be told; late by %v, failures %v", f.name, late.Most(), f.failed)
		}
	}
	faultlab.CleanUp(t, cluster.Client(t), "tokenbucket:")
}

// D9: the cluster serves a bucket's slot no more. Calls return within their deadlines with an error of a known kind, nothing is
// taken, and permits come again soon after it does.
func TestD9ClusterDown(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	client := cluster.Client(t)
	late := faultlab.MeasureLateness(t)
	m := masters(t, cluster)[0]
	node := m.Client(t)
	for _, kind := range faultlab.Kinds {
		name := nameIn(t, node, kind, m.first, m.last)
		l, err := tokenbucket.NewSmoothBursty(name, 1000, tokenbucket.WithMaxPermits(1e6), tokenbucket.WithInitialPermits(1e6), tokenbucket.WithStore(faultlab.Stores[kind](client)),
			tokenbucket.WithStoreTimeout(5*time.Second)) // longer than any deadline here, and than the allowance for it
		require.NoError(t, err)
		before := 0
		for range 100 {
			ok, err := l.TryAcquire(background, 1, time.Second)
			require.NoError(t, err)
			require.True(t, ok)
			before++
		}
		state := client.Get(background, key(name)).Val()
		slot := int(node.ClusterKeySlot(background, key(name)).Val())
		require.NoError(t, node.ClusterDelSlots(background, slot).Err())
		during, overdue := 0, time.Duration(0)
		failed := map[string]int{}
		for began := time.Now(); during == 0 || time.Since(began) < 500*time.Millisecond; during++ {
			const limit = 200 * time.Millisecond
			ctx, cancel := context.WithTimeout(background, limit)
			began := time.Now()
			ok, err := l.TryAcquire(ctx, 1, 0)
			took := time.Since(began)
			cancel()
			require.False(t, ok)
			require.Error(t, err)
			failed[kindOf(err)]++
			require.NotEqual(t, "odd", kindOf(err), "%v", err)
			overdue = max(overdue, took-limit)
		}
		t.Logf("%s: %v; the machine was late by %v", kind, failed, late.Most())
		faultlab.Figure(t, "slowest answer after its deadline", overdue)
		assert.LessOrEqual(t, overdue, 250*time.Millisecond+4*late.Most())
		asked := time.Now()
		_, err = l.TryAcquire(background, 1, 0)
		t.Logf("%s: without a deadline: %v, after %v", kind, err, time.Since(asked))
		require.Error(t, err)
		failed[kindOf(err)]++
		faultlab.Bit(t, before, during)
		require.NoError(t, node.ClusterAddSlots(background, slot).Err())
		served := time.Now()
		require.Eventually(t, func() bool { return client.Get(background, key(name)).Err() == nil }, 20*time.Second, time.Millisecond)
		again := time.Now()
		require.Equal(t, state, client.Get(background, key(name)).Val(), "nothing was taken")
		require.Eventually(t, func() bool {
			ok, err := l.TryAcquire(background, 1, time.Second)
			return err == nil && ok
		}, 20*time.Second, time.Millisecond)
		t.Logf("%s: %v; the slot was served %v after it was given back", kind, failed, again.Sub(served))
		faultlab.Figure(t, "a permit after the slot was served again", time.Since(again))
		assert.LessOrEqual(t, time.Since(again), 3*time.Second+10*late.Most())
	}
	faultlab.CleanUp(t, client, "tokenbucket:")
}
