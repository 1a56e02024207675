package instances

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

var background = context.Background()

func TestMain(m *testing.M) { redistest.Main(m) }

// A lower number of instances counts only after it has been lower for as long as a silent instance counts, and was requested.
func TestCountOfInstances(t *testing.T) {
	m := &Member{}
	for _, n := range []int64{10, 1, 3} {
		m.Count(n)
		require.EqualValues(t, 10, m.Live())
	}
	m.countedAt = m.countedAt.Add(-LiveFor - 1)
	m.Count(3)
	require.EqualValues(t, 3, m.Live())
	m.Count(4)
	require.EqualValues(t, 4, m.Live())
	m.unknown(false)
	require.EqualValues(t, 4, m.Live())
	m.unknown(true)
	require.Zero(t, m.Live())
}

// Members count each other, except those that were silent for too long, and the key expires with them.
func TestHeartbeat(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	key := fmt.Sprint(t.Name(), time.Now().UnixNano())
	var warned atomic.Int64
	warn := func(error) { warned.Add(1) }
	var fleet [3]Instances // as in three processes
	var members []*Member
	for i := range fleet {
		m := fleet[i].Join(client, key, warn)
		require.Same(t, m, fleet[i].Join(client, key, warn))
		members = append(members, m)
	}
	for _, m := range members {
		require.Eventually(t, func() bool { return m.Live() == 3 }, 20*time.Second, 10*time.Millisecond)
	}
	ttl := client.PTTL(background, key).Val()
	require.Positive(t, ttl)
	require.LessOrEqual(t, ttl, LiveFor)
	require.NoError(t, client.ZAdd(background, key, redis.Z{Score: 1, Member: "long gone"}).Err())
	require.NoError(t, client.ZAdd(background, key, redis.Z{Score: 1e15, Member: "by a clock that was set back"}).Err())
	_, err := Script.Run(background, client, 1, key, "d", "7000")
	require.NoError(t, err)
	require.EqualValues(t, 4, client.ZCard(background, key).Val())
	require.Zero(t, warned.Load())
	runtime.KeepAlive(members)
}

// counter is a fake of Redis with a scripted reply to heartbeats.
type counter struct {
	mu    sync.Mutex
	live  string
	err   error
	beats int
}

func (c *counter) Process(_ context.Context, cmd redis.Cmder) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.beats++
	if c.err != nil {
		cmd.SetErr(c.err)
		return c.err
	}
	cmd.(script.Call).SetVal([]string{c.live})
	return nil
}

func (c *counter) answers(live string, err error) (beats int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live, c.err = live, err
	return c.beats
}

// An instance that cannot be counted warns once, and one that is unreachable sends no heartbeats.
func TestUncounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := new(counter)
		client.answers("", errors.New("WRONGTYPE Operation against a key holding the wrong kind of value"))
		var i Instances
		var warned atomic.Int64
		m := i.Join(client, "instances", func(err error) {
			if warned.Add(1); err == nil {
				t.Error("no error")
			}
		})
		m.Count(3)
		time.Sleep(heartbeatEvery * 5 / 2)
		require.Zero(t, m.Live())
		require.EqualValues(t, 1, warned.Load())
		before := client.answers("1", nil)
		require.Greater(t, before, 1)
		time.Sleep(heartbeatEvery * 5 / 4)
		require.EqualValues(t, 1, m.Live())
		runtime.KeepAlive(m)
		m = nil
		for range 100 {
			runtime.GC()
			time.Sleep(heartbeatEvery * 5 / 4)
			if i.member.Value() == nil {
				break
			}
		}
		require.Nil(t, i.member.Value())
		gone := client.answers("1", nil)
		time.Sleep(10 * heartbeatEvery)
		require.LessOrEqual(t, client.answers("1", nil)-gone, 1)
	})
}

// If the key holds another type, a real server refuses the heartbeat, and the warning has its error.
func TestUncountedByRedis(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	key := fmt.Sprint(t.Name(), time.Now().UnixNano())
	require.NoError(t, client.Set(background, key, "another's", 0).Err())
	warned := make(chan error, 1)
	var i Instances
	m := i.Join(client, key, func(err error) { warned <- err })
	require.ErrorContains(t, <-warned, "WRONGTYPE")
	require.Zero(t, m.Live())
}

// panicking is a client whose hooks panic.
type panicking struct{ calls atomic.Int64 }

func (p *panicking) Process(context.Context, redis.Cmder) error {
	p.calls.Add(1)
	panic("hook")
}

// A panic of the client is warned of once, and heartbeats go on.
func TestClientPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var warned atomic.Int64
		p := new(panicking)
		m := new(Instances).Join(p, "key", func(err error) {
			require.ErrorContains(t, err, "panicked: hook")
			warned.Add(1)
		})
		time.Sleep(10 * heartbeatEvery)
		require.Greater(t, p.calls.Load(), int64(5))
		require.EqualValues(t, 1, warned.Load())
		runtime.KeepAlive(m)
		m = nil
		runtime.GC()
		time.Sleep(10 * heartbeatEvery)
	})
}
