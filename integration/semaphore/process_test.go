// Package semaphore tests package semaphore as a fleet uses it: with several processes that are killed and stopped, connections that are
// cut and hang, and a real redis-server that loses its state. The processes' events are checked from outside.
package semaphore

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

var ctx = context.Background()

// patient is the store timeout of callers that must not mistake a slow machine for a fault.
const patient = 20 * time.Second

const workerEnv = "TOKENBUCKET_SEMAPHORE_WORKER"

func TestMain(m *testing.M) {
	if text := os.Getenv(workerEnv); text != "" {
		if err := work(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	faultlab.Parallel(4)
	redistest.Main(m)
}

// job is what a worker, a process of the fleet, has to do until its standard input ends.
type job struct {
	Do           string // a key of jobs
	Redis, Label string
	Semaphores   []spec
	// Of chaos.
	Workers int
	Seed    uint64
	// Of queue.
	Arrivals []arrival
}

type spec struct {
	Name    string
	Permits int
	Lease   time.Duration
	Version int64
	Timeout time.Duration // 0: patient
}

// event is a line of a worker's output. Times are microseconds of this machine's one clock.
type event struct {
	What  string
	ID    string `json:",omitempty"`
	Fence int64  `json:",omitempty"`
	N     int    `json:",omitempty"`
	Call  int64  `json:",omitempty"` // when it was begun; At: when it was done
	At    int64
	Text  string `json:",omitempty"`
}

func now() int64 { return time.Now().UnixMicro() }

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

var jobs = map[string]func(*child) error{"chaos": chaos, "queue": queue, "crowd": crowd, "limit": limit, "watch": watch}

// child is what a worker has, on its side.
type child struct {
	job
	ctx        context.Context // until the standard input ends
	semaphores []*semaphore.Semaphore
	commands   chan []string // the lines of the standard input

	mu  sync.Mutex
	enc *json.Encoder
}

func (c *child) tell(e event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.At == 0 {
		e.At = now()
	}
	_ = c.enc.Encode(e) // one write: nothing is lost with the process
}

func work(text string) error {
	c := &child{commands: make(chan []string), enc: json.NewEncoder(os.Stdout)}
	if err := json.Unmarshal([]byte(text), &c.job); err != nil {
		return err
	}
	client := redis.NewClient(&redis.Options{Addr: c.Redis, Username: fleetUser, Password: "any"})
	defer func() { _ = client.Close() }()
	for _, s := range c.Semaphores {
		made, err := semaphore.NewRedis(client, s.Name, s.Permits, semaphore.WithLease(s.Lease), semaphore.WithLabel(c.Label),
			semaphore.WithVersion(s.Version), semaphore.WithStoreTimeout(cmp.Or(s.Timeout, patient)))
		if err != nil {
			return err
		}
		c.semaphores = append(c.semaphores, made)
	}
	ctx, cancel := context.WithCancel(ctx)
	c.ctx = ctx
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			c.commands <- strings.Fields(lines.Text())
		}
		close(c.commands)
		cancel()
	}()
	if err := jobs[c.Do](c); err != nil {
		return err
	}
	for _, s := range c.semaphores {
		limited, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Close(limited); err != nil {
			return err
		}
	}
	return nil
}

// process is a running worker, as its parent sees it.
type process struct {
	job
	cmd    *exec.Cmd
	in     io.WriteCloser
	events chan event // unless start has got a function for them
	read   chan struct{}
	ended  atomic.Bool
	began  int64
	killed int64 // the time just before; 0 if it was not killed
}

// start starts a worker. hear is called for each of its events, from one goroutine; if it is nil, the events are sent to events.
func start(t *testing.T, j job, hear func(p *process, e event)) *process {
	t.Helper()
	text, err := json.Marshal(j)
	require.NoError(t, err)
	p := &process{job: j, cmd: exec.Command(os.Args[0]), read: make(chan struct{}), began: now(), events: make(chan event, 1<<16)}
	if hear == nil {
		hear = func(p *process, e event) { p.events <- e }
	}
	p.cmd.Env = append(os.Environ(), workerEnv+"="+string(text), "GORACE=atexit_sleep_ms=10 "+os.Getenv("GORACE")) // not a second
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.read)
		defer close(p.events)
		for lines := json.NewDecoder(out); ; {
			var e event
			if lines.Decode(&e) != nil {
				return
			}
			hear(p, e)
		}
	}()
	t.Cleanup(func() {
		if !p.ended.Load() {
			p.kill()
		}
	})
	return p
}

// kill kills the process as kill -9 does, and waits until it has ended and all of its events have arrived.
func (p *process) kill() {
	p.ended.Store(true)
	p.killed = now()
	_ = p.cmd.Process.Kill()
	<-p.read
	_ = p.cmd.Wait()
}

// end lets the process finish, and waits for it.
func (p *process) end(t *testing.T) {
	t.Helper()
	_ = p.in.Close()
	<-p.read
	p.ended.Store(true)
	require.NoError(t, p.cmd.Wait(), "process %s", p.Label)
}

func (p *process) command(line string) { _, _ = io.WriteString(p.in, line+"\n") }

// next returns the process' next event.
func (p *process) next(t *testing.T) event {
	t.Helper()
	select {
	case e, ok := <-p.events:
		require.True(t, ok, "process %s has ended", p.Label)
		return e
	case <-time.After(60 * time.Second):
		require.FailNow(t, "silence", "process %s", p.Label)
		return event{}
	}
}

// expect returns the process' next event, which must be this.
func (p *process) expect(t *testing.T, what string) event {
	t.Helper()
	e := p.next(t)
	require.Equal(t, what, e.What, "%+v", e)
	return e
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(s))
}

// fleetUser is who the processes of a fleet are to Redis: so that their connections can be killed, and no others.
const fleetUser = "fleet"

// server starts a server that knows the fleet.
func server(t *testing.T) (*redistest.Server, *redis.Client) {
	t.Helper()
	s := redistest.Start(t)
	client := s.Client(t)
	require.NoError(t, client.Do(ctx, "ACL", "SETUSER", fleetUser, "on", "nopass", "~*", "&*", "+@all").Err())
	return s, client
}

// open returns a semaphore that stands for a process of its own: with a client of its own. Its timeout is patient.
func open(t *testing.T, addr, name string, permits int, opts ...semaphore.Option) *semaphore.Semaphore {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: addr, Username: fleetUser, Password: "any"})
	s, err := semaphore.NewRedis(client, name, permits, append([]semaphore.Option{semaphore.WithStoreTimeout(patient)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		limited, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := s.Close(limited); err != nil {
			t.Log("close: ", err)
		}
		_ = client.Close()
	})
	return s
}

// base is what the keys of a semaphore begin with, whose name needs no escape.
func base(name string) string { return "semaphore:{" + name + "}:" }
