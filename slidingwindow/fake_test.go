package slidingwindow

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// inBubble runs a test in a bubble of synctest. Its clock begins in the year 2000, which is before this process began, a time that
// the package never meets: so it moves on first.
func inBubble(t *testing.T, test func(t *testing.T)) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(50 * 365 * 24 * time.Hour)
		test(t)
	})
}

// bubble is inBubble as a subtest.
func bubble(t *testing.T, name string, test func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { inBubble(t, test) })
}

// noDeadline is a test as rapid can have it in a bubble, where none has a deadline.
type noDeadline struct{ *testing.T }

// execute is lua/apply.lua in Go: what the script answers, and what is stored afterwards. TestDifferential compares them. old is
// "" if nothing is stored; server is the server's clock.
func execute(old string, args []string, server int64) (reply []string, next string, err error) {
	number := func(i int) int64 {
		n, err := strconv.ParseInt(args[i], 10, 64)
		if err != nil {
			panic(fmt.Sprintf("argument %d: %v", i, err))
		}
		return n
	}
	clock := server
	if args[1] != "" {
		clock = number(1)
	}
	if args[7] != "" && clock > number(7) {
		return []string{"late", decimal(clock)}, old, nil
	}
	r := rule{Exact, number(2), number(3), number(2) / number(3)}
	if args[4] == Approximate.String() {
		r.mode = Approximate
	}
	var t counts
	st := state{epoch: number(8)}
	changed := false
	limit, version := number(5), int64(0)
	if old != "" {
		var ok bool
		if st, ok = parse(old); !ok {
			return nil, old, fakeReply(fmt.Sprintf("CORRUPT %.80q", old))
		}
		if own := number(12); st.version > own || st.version == own && st.version > 0 && st.limit <= limit {
			limit, version = st.limit, st.version
		}
		seen := st.seen
		if by := seen - clock; by > standstill { // before they are counted with another resolution
			if args[16] == "1" {
				return []string{"behind", decimal(by)}, old, nil
			}
			changed = true
			for i := range st.parts {
				st.parts[i].last -= by
			}
			if seen, st.back = clock, st.back+by; st.back > maxInteger {
				st.back, st.epoch = 0, number(8)
			}
		}
		t.load(&r, seen, st.parts)
	}
	now := t.advance(&r, clock)
	if version == 0 && args[12] != "0" {
		version, changed = number(12), true
	}
	if args[13] != "" && version < maxInteger {
		limit, version, changed = number(13), version+1, true
	}
	if args[10] != "" {
		changed = true
		all := t.list()
		owed, _ := parseParts(args[10], true)
		for _, p := range owed {
			p.last = min(p.last, now)
			i, _ := slices.BinarySearchFunc(all, p, func(a, b part) int { return int(a.last - b.last) })
			all = slices.Insert(all, i, p)
		}
		t.load(&r, now, all)
	}
	if args[14] != "" && decimal(st.epoch) == args[15] {
		refunds, _ := parseParts(args[14], true)
		for _, p := range refunds {
			changed = t.remove(&r, p.last-st.back, p.count) > 0 || changed
		}
	}
	overflow := false
	add := func(n int64) {
		if n > 0 {
			changed = true
			overflow = !t.add(&r, n) || overflow
		}
	}
	add(number(9))
	var granted []string
	for _, word := range strings.Fields(args[11]) {
		n, times, _ := strings.Cut(word, ":")
		a := ask{}
		a.n, _ = strconv.ParseInt(n, 10, 64)
		a.times, _ = strconv.ParseInt(times, 10, 64)
		fit := min(a.times, max(0, limit-t.used(&r, now))/a.n)
		add(fit * a.n)
		granted = append(granted, decimal(fit))
	}
	if overflow {
		return nil, old, fakeReply("OVERFLOW")
	}
	if next = old; changed {
		st.seen, st.limit, st.version, st.parts = t.seen, limit, version, t.list()
		next = st.String()
	}
	return []string{fmt.Sprint(clock, " ", now), next, strings.Join(granted, " ")}, next, nil
}

// fakeReply is an error that Redis has sent.
type fakeReply string

func (r fakeReply) Error() string { return string(r) }
func (fakeReply) RedisError()     {}

// fakeRedis is a Redis within the process, for bubbles of synctest. Nothing in it expires. Its clock is the system's.
type fakeRedis struct {
	mu      sync.Mutex
	stored  map[string]string
	scripts int64
	way     way
}

// way is how a command gets to the server and back: run executes it there.
type way func(ctx context.Context, run func() error) error

func (r *fakeRedis) Process(ctx context.Context, cmd redis.Cmder) error {
	run := func() error { return r.run(cmd) }
	r.mu.Lock()
	way := r.way
	r.mu.Unlock()
	if way != nil {
		return way(ctx, run)
	}
	return run()
}

func (r *fakeRedis) run(cmd redis.Cmder) error {
	call, ok := cmd.(script.Call)
	if !ok { // a ping
		return nil
	}
	var args []string
	for _, a := range call.Args()[3:] {
		args = append(args, *a.(*string))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.scripts++
	reply, state, err := execute(r.stored[args[0]], args, time.Now().UnixMicro())
	if err != nil {
		return err
	}
	r.set(args[0], state)
	call.SetVal(reply)
	return nil
}

// set stores a state. mu is held.
func (r *fakeRedis) set(key, state string) {
	if r.stored == nil {
		r.stored = map[string]string{}
	}
	r.stored[key] = state
}

func (r *fakeRedis) put(key, state string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set(key, state)
}

func (r *fakeRedis) get(key string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stored[key]
}

// forget is a server that has lost everything.
func (r *fakeRedis) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stored = nil
}

func (r *fakeRedis) executed() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.scripts
}

// by changes the way of the commands that come; nil: the shortest.
func (r *fakeRedis) by(w way) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.way = w
}

// slow is a way that takes so long, half of it there.
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

// refused is what a client says if nobody listens.
var refused = &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}

// hang makes the server hang, as one that is stopped: what was sent to it is executed when it goes on. The client does not heed
// contexts.
func (r *fakeRedis) hang() (goOn func()) {
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

// lost is a way on which the first reply is lost. The client says why after so long.
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
