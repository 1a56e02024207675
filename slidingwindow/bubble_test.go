package slidingwindow

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// inBubble runs a test in a bubble of synctest. The bubble's clock begins in the year 2000, before this process was started, so it is moved
// on first.
func inBubble(t *testing.T, test func(t *testing.T)) {
	server.start(t)
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(50 * 365 * 24 * time.Hour)
		test(t)
	})
}

// bubble is inBubble as a subtest.
func bubble(t *testing.T, name string, test func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { inBubble(t, test) })
}

// noDeadline is a test without a deadline, for rapid in a bubble.
type noDeadline struct{ *testing.T }

// fakeReply is an error reply of Redis.
type fakeReply string

func (r fakeReply) Error() string { return string(r) }
func (fakeReply) RedisError()     {}

// outside runs functions in a goroutine outside of all bubbles, with a client of the shared server. In a bubble, the wait for a function is
// not durable, so the bubble's clock stands still meanwhile.
type outside struct {
	mu       sync.Mutex // held while a function runs
	client   *redis.Client
	requests chan func(*redis.Client) // nil before the first call of start
	done     chan struct{}
}

var server outside

// start starts the goroutine. It must be called outside of bubbles.
func (o *outside) start(t testing.TB) {
	addr := redistest.Shared(t).Addr
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.requests != nil {
		return
	}
	o.client = redis.NewClient(&redis.Options{Addr: addr})
	o.requests, o.done = make(chan func(*redis.Client)), make(chan struct{})
	go func() {
		for f := range o.requests {
			f(o.client)
			o.done <- struct{}{}
		}
	}()
}

// stop ends the goroutine.
func (o *outside) stop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.requests != nil {
		close(o.requests)
		_ = o.client.Close()
	}
}

// do returns when f has run.
func (o *outside) do(f func(*redis.Client)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.requests <- f
	<-o.done
}

// bubbleRedis is a client for bubbles of synctest. It runs lua/apply.lua on the shared server, with the bubble's clock in place of the
// server's, under keys of its own. The states do not expire during a test.
type bubbleRedis struct {
	mu      sync.Mutex
	prefix  string // of its keys; "" before the first
	keys    map[string]bool
	scripts int64
	way     way
}

// way is how a command gets to the server and back: run executes it there.
type way func(ctx context.Context, run func() error) error

func (r *bubbleRedis) Process(ctx context.Context, cmd redis.Cmder) error {
	run := func() error { return r.run(cmd) }
	r.mu.Lock()
	way := r.way
	r.mu.Unlock()
	if way != nil {
		return way(ctx, run)
	}
	return run()
}

func (r *bubbleRedis) run(cmd redis.Cmder) error {
	call, ok := cmd.(script.Call)
	if !ok { // a ping
		return nil
	}
	keys := call.Args()[2].(int)
	var args []string
	for _, a := range call.Args()[3:] {
		args = append(args, *a.(*string))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.scripts++
	for i := range keys {
		args[i] = r.key(args[i])
	}
	rest := args[keys:]
	if rest[0] == "" {
		rest[0] = decimal(time.Now().UnixMicro())
	}
	rest[4] = decimal(time.Hour.Milliseconds())
	var reply []string
	var err error
	server.do(func(c *redis.Client) { reply, err = applyScript.Run(ctx, c, keys, args...) })
	if err == nil {
		call.SetVal(reply)
	}
	return err
}

// key returns the key on the server. mu must be held.
func (r *bubbleRedis) key(key string) string {
	if r.keys == nil {
		r.prefix, r.keys = fmt.Sprintf("%016x:", rand.Uint64()), map[string]bool{}
	}
	key = r.prefix + key
	r.keys[key] = true
	return key
}

func (r *bubbleRedis) put(key, state string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key = r.key(key)
	server.do(func(c *redis.Client) {
		if err := c.Set(ctx, key, state, time.Hour).Err(); err != nil {
			panic(err)
		}
	})
}

// get returns the state under a key; "" if there is none.
func (r *bubbleRedis) get(key string) (state string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key = r.key(key)
	server.do(func(c *redis.Client) {
		var err error
		if state, err = c.Get(ctx, key).Result(); err != nil && !errors.Is(err, redis.Nil) {
			panic(err)
		}
	})
	return state
}

// remove removes a state.
func (r *bubbleRedis) remove(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key = r.key(key)
	server.do(func(c *redis.Client) {
		if err := c.Del(ctx, key).Err(); err != nil {
			panic(err)
		}
	})
}

// bubbleWay is a client of its own of a server in a bubble.
type bubbleWay struct {
	to  *bubbleRedis
	way atomic.Pointer[way]
}

func (r *bubbleWay) Process(ctx context.Context, cmd redis.Cmder) error {
	run := func() error { return r.to.Process(ctx, cmd) }
	if way := r.way.Load(); way != nil {
		return (*way)(ctx, run)
	}
	return run()
}

// by sets the way of the commands from now on; nil is the shortest.
func (r *bubbleWay) by(w way) {
	if r.way.Store(&w); w == nil {
		r.way.Store(nil)
	}
}

// forget removes all states, as a server that was restarted without its data.
func (r *bubbleRedis) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	server.do(func(c *redis.Client) {
		for key := range r.keys {
			if err := c.Del(ctx, key).Err(); err != nil {
				panic(err)
			}
		}
	})
}

func (r *bubbleRedis) executed() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.scripts
}

// by sets the way of the commands from now on; nil is the shortest.
func (r *bubbleRedis) by(w way) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.way = w
}

// slow returns a way that takes the given time, half of it to the server.
func slow(d time.Duration) way {
	return func(_ context.Context, run func() error) error {
		time.Sleep(d / 2)
		err := run()
		time.Sleep(d / 2)
		return err
	}
}

// failing is a way on which nothing arrives.
func failing(err error) way {
	return func(context.Context, func() error) error { return err }
}

// refused is the error of a client if no server listens.
var refused = &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}

// hang makes the server hang, as one that is stopped: it executes the commands that were sent meanwhile when it goes on. The client ignores
// contexts.
func (r *bubbleRedis) hang() (goOn func()) {
	open := make(chan struct{})
	r.by(func(_ context.Context, run func() error) error {
		<-open
		return run()
	})
	return func() {
		r.by(nil)
		close(open)
	}
}

// lost is a way on which the first reply is lost. The client returns the given error after the given time.
func lost(after time.Duration, err error) way {
	var first atomic.Bool
	return func(_ context.Context, run func() error) error {
		answer := run()
		if first.CompareAndSwap(false, true) {
			time.Sleep(after)
			return err
		}
		return answer
	}
}
