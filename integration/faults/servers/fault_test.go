package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// A fault is something wrong with a server, as its clients see it.
type fault struct {
	// words of which the server says one; none: it says nothing.
	words []string
	// config: it needs a repair, and until then it is no outage. Of the others, lost are those that end with the bucket gone.
	config, lost bool
	// args of the server, and what the limiter's client has besides.
	args   []string
	client func(*redis.Options)
	// setUp is called before anything else, if it is set.
	setUp func(*testing.T, *bench)
	// begin makes the server fail; end makes it well again.
	begin, end func(*testing.T, *bench)
}

// bench is a server with a limiter that uses it.
type bench struct {
	*faultlab.Node
	admin   *redis.Client            // on one connection that was made before the fault
	store   func() tokenbucket.Store // another one, with a client of its own
	open    func(opts ...tokenbucket.Option) *tokenbucket.RateLimiter
	limiter *tokenbucket.RateLimiter // opened by start
	name    string
	ended   chan error // what ran beside the fault
}

func (b *bench) key() string { return "tokenbucket:{" + b.name + "}" }

// rate of the bucket, in permits a second.
const rate = 10

// start starts a server for a fault, and a limiter of a bucket that is large enough for a test.
func (f *fault) start(t *testing.T, kind string, opts ...tokenbucket.Option) *bench {
	t.Helper()
	b := &bench{Node: faultlab.StartNode(t, f.args...), name: fmt.Sprint("b", rand.Uint64()), ended: make(chan error, 1)}
	b.admin = b.Client(t, func(o *redis.Options) { o.PoolSize, o.ReadTimeout, o.MaxRetries = 1, 20*time.Second, -1 })
	require.NoError(t, b.admin.Ping(background).Err())
	if f.setUp != nil {
		f.setUp(t, b)
	}
	var change []func(*redis.Options)
	if f.client != nil {
		change = append(change, f.client)
	}
	b.store = func() tokenbucket.Store { return faultlab.Stores[kind](b.Client(t, change...)) }
	store := b.store()
	b.open = func(opts ...tokenbucket.Option) *tokenbucket.RateLimiter {
		l, err := tokenbucket.NewSmoothBursty(b.name, rate, append([]tokenbucket.Option{
			tokenbucket.WithMaxPermits(1e6), tokenbucket.WithInitialPermits(1e6), tokenbucket.WithStore(store),
		}, opts...)...)
		require.NoError(t, err)
		return l
	}
	b.limiter = b.open(opts...)
	return b
}

// warm takes permits before the fault and returns the bucket as it is stored then.
func (b *bench) warm(t *testing.T, n int) string {
	t.Helper()
	for n > 0 {
		switch ok, err := b.limiter.TryAcquire(background, 1, 0); {
		case errors.Is(err, tokenbucket.ErrStoreTimeout), errors.Is(err, tokenbucket.ErrStoreUnavailable): // on a machine that stalls
		default:
			require.NoError(t, err)
			require.True(t, ok)
			n--
		}
	}
	return b.stored(t)
}

// says reports whether an error has one of the server's words.
func (f *fault) says(err error) bool {
	return f.words == nil || slices.ContainsFunc(f.words, func(w string) bool { return strings.Contains(err.Error(), w) })
}

// stored is the bucket as the server has it.
func (b *bench) stored(t *testing.T) string {
	t.Helper()
	text, err := b.admin.Get(background, b.key()).Result()
	require.NoError(t, err)
	return text
}

// typed reports whether a caller can recognise the kind of an error by errors.Is.
func typed(err error) bool {
	for _, is := range []error{
		tokenbucket.ErrStoreUnavailable, tokenbucket.ErrStoreTimeout, tokenbucket.ErrLockNotObtained, tokenbucket.ErrCorruptState,
		context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed,
	} {
		if errors.Is(err, is) {
			return true
		}
	}
	var reply redis.Error
	var network *net.OpError
	var broken syscall.Errno
	return errors.As(err, &reply) || errors.As(err, &network) || errors.As(err, &broken)
}

// config runs a CONFIG SET.
func config(name, value string) func(*testing.T, *bench) {
	return func(t *testing.T, b *bench) {
		t.Helper()
		require.NoError(t, b.admin.ConfigSet(background, name, value).Err())
	}
}

// acl runs ACL SETUSER default, and throws out who is connected.
func acl(rules ...string) func(*testing.T, *bench) {
	return func(t *testing.T, b *bench) {
		t.Helper()
		args := []any{"ACL", "SETUSER", "default"}
		for _, r := range rules {
			args = append(args, r)
		}
		require.NoError(t, b.admin.Do(background, args...).Err())
		throwOut(t, b)
	}
}

// throwOut ends all connections but the admin's.
func throwOut(t *testing.T, b *bench) {
	t.Helper()
	require.Eventually(t, func() bool { // so that no call finds out by losing one; calls in flight may connect again
		err := b.admin.Do(background, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err()
		return err == nil && strings.Count(b.admin.ClientList(background).Val(), "id=") == 1
	}, 20*time.Second, time.Millisecond)
}

// nowhere is an address where no master is.
const nowhere = "127.0.0.1 1"

func replicaOf(where string) func(*testing.T, *bench) {
	return func(t *testing.T, b *bench) {
		t.Helper()
		host, port, _ := strings.Cut(where, " ")
		require.NoError(t, b.admin.ReplicaOf(background, host, port).Err())
	}
}

// both runs one after the other.
func both(steps ...func(*testing.T, *bench)) func(*testing.T, *bench) {
	return func(t *testing.T, b *bench) {
		t.Helper()
		for _, step := range steps {
			step(t, b)
		}
	}
}

// await waits until the server replies with the given word to a command of a user who is not the admin.
func await(t *testing.T, b *bench, word string) {
	t.Helper()
	client := b.Client(t, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout, o.DialerRetries = -1, 100*time.Millisecond, 1 })
	require.Eventually(t, func() bool {
		err := client.Do(background, "EVAL", "return redis.call('SET', KEYS[1], 1, 'PX', 10)", 1, "{"+b.name+"}probe").Err()
		return err != nil && strings.Contains(err.Error(), word)
	}, 20*time.Second, time.Millisecond, "the server never says %s", word)
}

func awaiting(word string) func(*testing.T, *bench) {
	return func(t *testing.T, b *bench) { t.Helper(); await(t, b, word) }
}

// faults are all that this package knows, by the names of their rows.
var faults = map[string]*fault{
	"F1 OOM": {
		words: []string{"OOM"}, begin: both(config("maxmemory-policy", "noeviction"), config("maxmemory", "1"), awaiting("OOM")), end: config("maxmemory", "0"),
	},
	"F2 READONLY": {words: []string{"READONLY"}, begin: both(replicaOf(nowhere), awaiting("READONLY")), end: replicaOf("NO ONE")},
	"F3 LOADING": {
		words: []string{"LOADING"}, args: []string{"--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024"},
		setUp: func(t *testing.T, b *bench) {
			require.NoError(t, b.admin.Eval(background,
				"for i = 1, 40000 do redis.call('SET', 'ballast:' .. i, 'x', 'PX', 3600000) end return 1", nil).Err())
		},
		begin: func(t *testing.T, b *bench) { // twenty seconds, unless it is ended
			client := b.Client(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Minute, -1 })
			go func() { b.ended <- client.Do(background, "DEBUG", "RELOAD").Err() }()
			await(t, b, "LOADING")
		},
		end: func(t *testing.T, b *bench) { config("key-load-delay", "0")(t, b); require.NoError(t, <-b.ended) },
	},
	"F4 MISCONF": {
		words: []string{"MISCONF"},
		begin: func(t *testing.T, b *bench) {
			config("save", "3600 1")(t, b)
			dir := b.admin.ConfigGet(background, "dir").Val()["dir"]
			require.Contains(t, dir, os.TempDir())
			require.NoError(t, os.RemoveAll(dir))
			require.NoError(t, b.admin.BgSave(background).Err())
			await(t, b, "MISCONF")
		},
		end: config("save", ""),
	},
	"F5 NOREPLICAS": {words: []string{"NOREPLICAS"}, begin: both(config("min-replicas-to-write", "1"), awaiting("NOREPLICAS")), end: config("min-replicas-to-write", "0")},
	// A plain write is refused as on any replica.
	"F6 MASTERDOWN": {
		words: []string{"MASTERDOWN", "READONLY"}, begin: both(config("replica-serve-stale-data", "no"), replicaOf(nowhere), awaiting("MASTERDOWN")), end: replicaOf("NO ONE"),
	},
	// It replies "unauthenticated multibulk length" to a command of more than ten words, and hangs up: a client that uses that connection
	// once more gets no reply.
	"F7 NOAUTH": {words: []string{"NOAUTH", "unauthenticated", "EOF"}, config: true, begin: both(config("requirepass", "secret"), throwOut), end: config("requirepass", "")},
	"F7 WRONGPASS": {
		words: []string{"WRONGPASS"}, config: true, client: func(o *redis.Options) { o.Password = "old" },
		setUp: config("requirepass", "old"), begin: both(config("requirepass", "new"), throwOut), end: config("requirepass", "old"),
	},
	"F7 NOPERM command": {words: []string{"NOPERM"}, config: true, begin: acl("-evalsha", "-eval"), end: acl("+@all")},
	"F7 NOPERM key":     {words: []string{"NOPERM"}, config: true, begin: acl("resetkeys", "~other:*"), end: acl("allkeys")},
	// Redis 7.0 has no word for it; later releases say NOPERM.
	"F7 TIME denied": {words: []string{"can't run this command"}, config: true, begin: acl("-time"), end: acl("+@all")},
	"F7 WRONGTYPE": {
		words: []string{"corrupt state"}, config: true, lost: true,
		begin: func(t *testing.T, b *bench) {
			require.NoError(t, b.admin.Del(background, b.key()).Err())
			require.NoError(t, b.admin.RPush(background, b.key(), 1).Err())
		},
		end: func(t *testing.T, b *bench) { require.NoError(t, b.admin.Del(background, b.key()).Err()) },
	},
	"F7 corrupt state": {
		words: []string{"corrupt state"}, config: true, lost: true,
		begin: func(t *testing.T, b *bench) {
			require.NoError(t, b.admin.Set(background, b.key(), "hello", time.Hour).Err())
		},
		end: func(t *testing.T, b *bench) { require.NoError(t, b.admin.Del(background, b.key()).Err()) },
	},
	"F8 BUSY": {
		words: []string{"BUSY"}, args: []string{"--busy-reply-threshold", "100"},
		begin: func(t *testing.T, b *bench) {
			client := b.Client(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Minute, -1 })
			go func() { b.ended <- client.Do(background, "EVAL", "while true do end", 0).Err() }()
			await(t, b, "BUSY")
		},
		end: func(t *testing.T, b *bench) {
			require.NoError(t, b.admin.ScriptKill(background).Err())
			require.ErrorContains(t, <-b.ended, "killed")
		},
	},
	// One that has written cannot be killed: only its server can.
	"F8 UNKILLABLE": {
		words: []string{"BUSY"}, lost: true, args: []string{"--busy-reply-threshold", "100"},
		begin: func(t *testing.T, b *bench) {
			client := b.Client(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Minute, -1 })
			script := "redis.call('SET', KEYS[1], 1, 'PX', 3600000) while true do end"
			go func() { b.ended <- client.Do(background, "EVAL", script, 1, "{"+b.name+"}written").Err() }()
			await(t, b, "BUSY")
		},
		end: func(t *testing.T, b *bench) {
			require.ErrorContains(t, b.admin.ScriptKill(background).Err(), "UNKILLABLE")
			b.Kill()
			require.Error(t, <-b.ended)
			b.Restart(t)
		},
	},
	// It says so and hangs up, which often overtakes what it said.
	"F9 maxclients": {
		words: []string{"max number of clients", "broken pipe", "connection reset", "EOF"}, begin: both(config("maxclients", "1"), throwOut), end: config("maxclients", "10000"),
	},
	"refused": {
		words: []string{"refused"}, lost: true,
		begin: func(_ *testing.T, b *bench) { b.Kill() }, end: func(t *testing.T, b *bench) { b.Restart(t) },
	},
	"hung": {
		begin: func(t *testing.T, b *bench) { require.NoError(t, b.Stop()) }, end: func(t *testing.T, b *bench) { require.NoError(t, b.Continue()) },
	},
	"CLUSTERDOWN": {
		words: []string{"CLUSTERDOWN"}, args: []string{"--cluster-enabled", "yes"},
		setUp: func(t *testing.T, b *bench) {
			require.NoError(t, b.admin.ClusterAddSlotsRange(background, 0, 16383).Err())
			require.Eventually(t, func() bool {
				return strings.Contains(b.admin.ClusterInfo(background).Val(), "cluster_state:ok")
			}, 20*time.Second, 5*time.Millisecond)
		},
		begin: func(t *testing.T, b *bench) {
			slot := b.admin.ClusterKeySlot(background, b.key()).Val()
			require.NoError(t, b.admin.ClusterDelSlots(background, int(slot)).Err())
			await(t, b, "CLUSTERDOWN")
		},
		end: func(t *testing.T, b *bench) {
			slot := b.admin.ClusterKeySlot(background, b.key()).Val()
			require.NoError(t, b.admin.ClusterAddSlots(background, int(slot)).Err())
		},
	},
}
