package tokenbucket

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// WorkerEnv holds the work of a process that TestProcesses starts: this test binary, run again.
const WorkerEnv = "TOKENBUCKET_TEST_WORKER"

// work is what one process does: callers that each wait for a permit and call the upstream with it, again and again.
type work struct {
	Redis    []string // one address, or a cluster's
	Bucket   string
	Store    string
	Rate     float64
	Burst    float64
	Callers  int
	Upstream string
	Until    time.Time
}

func (w *work) open() (RedisClient, io.Closer) {
	if len(w.Redis) > 1 {
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: w.Redis})
		return c, c
	}
	c := redis.NewClient(&redis.Options{Addr: w.Redis[0]})
	return c, c
}

func (w *work) limiter(client RedisClient) (*RateLimiter, error) {
	return NewSmoothBursty(w.Bucket, w.Rate, WithMaxPermits(w.Burst), WithInitialPermits(w.Burst), WithStore(redisStores(client)[w.Store]),
		WithStoreTimeout(30*time.Second)) // a busy machine is no outage
}

// Worker is the main function of such a process. It prints, a line a permit, when it was due by the server's clock.
func Worker() int {
	var w work
	if err := json.Unmarshal([]byte(os.Getenv(WorkerEnv)), &w); err != nil {
		panic(err)
	}
	client, closer := w.open()
	defer func() { _ = closer.Close() }()
	l, err := w.limiter(client)
	if err != nil {
		panic(err)
	}
	upstream, err := net.Dial("tcp", w.Upstream)
	if err != nil {
		panic(err)
	}
	defer func() { _ = upstream.Close() }()
	out := bufio.NewWriter(os.Stdout)
	defer func() { _ = out.Flush() }()
	var mu sync.Mutex
	var callers sync.WaitGroup
	for range w.Callers {
		callers.Go(func() {
			for time.Now().Before(w.Until) {
				r, err := l.TryReserve(context.Background(), 1, 500*time.Millisecond)
				if err != nil {
					panic(err)
				}
				if !r.OK() {
					time.Sleep(r.RetryAfter())
					continue
				}
				<-r.Ready()
				mu.Lock()
				_, err = upstream.Write([]byte{1})
				_, _ = fmt.Fprintln(out, r.call.place.after.Next, min(r.call.again, 1))
				mu.Unlock()
				if err != nil {
					panic(err)
				}
			}
		})
	}
	callers.Wait()
	return 0
}

// upstream counts what reaches it, by one clock.
type upstream struct {
	net.Listener
	mu       sync.Mutex
	arrivals []event
	readers  sync.WaitGroup
}

func startUpstream(t *testing.T) *upstream {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	u := &upstream{Listener: l}
	u.readers.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			u.readers.Go(func() { u.read(conn) })
		}
	})
	t.Cleanup(func() { _ = l.Close() })
	return u
}

func (u *upstream) read(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	buf := make([]byte, 4096)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		u.mu.Lock()
		u.arrivals = append(u.arrivals, event{time.Now().UnixMicro(), float64(n)})
		u.mu.Unlock()
	}
}

// Four processes, two with the lock store and two with the script store, on one bucket of a real server and of a real
// cluster, at full demand for ten seconds: the bound holds by the server's clock and by the upstream's, nothing is lost,
// and at least 98 % of the rate is handed out.
func TestProcesses(t *testing.T) {
	const seconds = 10
	cluster := redistest.StartCluster(t)
	for name, addrs := range map[string][]string{"server": {redistest.Start(t).Addr}, "cluster": cluster.Addrs} {
		t.Run(name, func(t *testing.T) {
			u := startUpstream(t)
			w := work{
				Redis: addrs, Bucket: fmt.Sprint("b", rand.Uint64()), Rate: 2000, Burst: 200, Callers: 64, Upstream: u.Addr().String(),
				Until: time.Now().Add(seconds * time.Second),
			}
			var due []event
			again := int64(0) // asked again, since their process had no turn for long
			var mu sync.Mutex
			var processes sync.WaitGroup
			began := time.Now()
			for i := range 4 {
				w.Store = []string{"lock", "script"}[i%2]
				text, err := json.Marshal(w)
				require.NoError(t, err)
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), WorkerEnv+"="+string(text))
				cmd.Stderr = os.Stderr
				out, err := cmd.StdoutPipe()
				require.NoError(t, err)
				require.NoError(t, cmd.Start())
				store := w.Store
				processes.Go(func() {
					var mine []event
					for s := bufio.NewScanner(out); s.Scan(); {
						var at, twice int64
						if _, err := fmt.Sscan(s.Text(), &at, &twice); err != nil {
							t.Error(err)
						}
						mine = append(mine, event{at, 1})
						mu.Lock()
						again += twice
						mu.Unlock()
					}
					if err := cmd.Wait(); err != nil {
						t.Error(err)
					}
					t.Logf("process %d (%s store): %d permits", cmd.Process.Pid, store, len(mine))
					mu.Lock()
					due = append(due, mine...)
					mu.Unlock()
				})
			}
			processes.Wait()
			took := time.Since(began)
			_ = u.Close()
			u.readers.Wait()

			client, closer := w.open()
			defer func() { _ = closer.Close() }()
			l, err := w.limiter(client)
			require.NoError(t, err)
			b, err := l.State(background)
			require.NoError(t, err)
			if again == 0 {
				require.EqualValues(t, b.Seq-1, len(due), "what was taken reached its caller")
			} else {
				t.Logf("this machine is so busy that %d callers had to ask again", again)
				require.GreaterOrEqual(t, b.Seq-1, int64(len(due))+again)
			}
			require.EqualValues(t, 0, client.(redis.Cmdable).Exists(background, "tokenbucket:{"+w.Bucket+"}:lock").Val())

			level := worst(due, w.Rate) // sorts
			span := float64(due[len(due)-1].at-due[0].at) / 1e6
			t.Logf("%d permits in %.2f s (%v): %.1f %% of rate × T; worst window %.3f of %v + rate × T",
				len(due), span, took.Round(time.Millisecond), 100*float64(len(due))/(w.Rate*span), level, w.Burst)
			require.LessOrEqual(t, level, w.Burst+w.Rate*1e-6+1e-6)
			require.GreaterOrEqual(t, float64(int64(len(due))+again)-w.Burst, 0.98*w.Rate*span)
			require.GreaterOrEqual(t, span, seconds-2.0)

			arrived := worst(u.arrivals, w.Rate)
			total, earliest, latest := 0.0, int64(1<<62), int64(0)
			for _, a := range u.arrivals { // in both orders the k-th due is the k-th to arrive
				for range int(a.n) {
					late := a.at - due[int(total)].at
					earliest, latest = min(earliest, late), max(latest, late)
					total++
				}
			}
			late := float64(latest-earliest) / 1e6
			t.Logf("upstream: %v arrived, between %d and %d µs after they were due; worst window %.3f, allowed %.3f",
				total, earliest, latest, arrived, w.Burst+w.Rate*late)
			require.EqualValues(t, len(due), total)
			require.GreaterOrEqual(t, earliest, int64(-1000), "none before it was due")
			require.LessOrEqual(t, arrived, w.Burst+w.Rate*late+w.Rate*1e-6+1e-6)
		})
	}
}
