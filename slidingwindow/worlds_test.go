package slidingwindow

import (
	"encoding/binary"
	"fmt"
	"go/parser"
	"go/token"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

// The files of the machine import nothing that locks, reads a clock or sends, use no channel and no goroutine, and no Process.
func TestMachineIsPure(t *testing.T) {
	for _, file := range []string{"machine.go", "settle.go", "batch.go", "queue.go", "admitted.go", "counts.go", "view.go", "codec.go"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		f, err := parser.ParseFile(token.NewFileSet(), file, text, parser.ImportsOnly)
		require.NoError(t, err)
		for _, i := range f.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			require.NotContains(t, []string{"sync", "sync/atomic", "context"}, path, file)
			require.False(t, strings.Contains(path, "clockwork") || strings.Contains(path, "go-redis"), "%s imports %s", file, path)
		}
		for _, word := range []string{"time.Now", "time.Since", "clock.Mono(", "go func", "rand.N(", "rand.Int64N(", "chan ", "waiting.Process", "waiting.New"} {
			require.NotContains(t, string(text), word, file)
		}
	}
}

// world is a machine, a server and a clock, on one goroutine.
type world struct {
	m       machine
	micros  int64
	pause   time.Duration // when the next probe may be sent, during an outage
	calls   map[int]*call
	ended   map[int]bool
	log     []string
	store   counts // of the server
	granted []part // every admission by the server
	next    waiting.Next
	wakeAt  int64 // when the next Tick by Next.Wait is due
	ring    time.Duration
}

func newWorld(limit int64, window, resolution time.Duration, failure FailurePolicy, seed uint64) *world {
	w := &world{calls: map[int]*call{}, ended: map[int]bool{}, micros: begin}
	w.m = machine{
		config: config{
			name: "x", key: "x", sender: "p", rule: rule{window.Microseconds(), resolution.Microseconds(), int64(window / resolution)},
			policy: policy{waiters: 1000, timeout: time.Second, failure: failure},
		},
		limit: limit, random: *rand.NewPCG(seed, seed),
	}
	return w
}

// step makes a step of the machine, as waiting.Process does.
func (w *world) step(f func(now waiting.Moment, out *waiting.Out) waiting.Moment) {
	var out waiting.Out
	mono := time.Duration(w.micros-begin+1) * time.Microsecond
	now := waiting.Moment{Local: w.micros, Mono: mono}
	if w.m.fault != nil {
		now.Pause = max(0, w.pause-mono)
	}
	now = f(now, &out)
	w.next = w.m.Tick(now, &out)
	if w.wakeAt = 0; w.next.Wait > 0 {
		w.wakeAt = w.micros + w.next.Wait.Microseconds()
	}
	var ids []int
	for id := range w.calls {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		if c := w.calls[id]; c.Ended() && !w.ended[id] {
			w.ended[id] = true
			what := "refused"
			switch {
			case c.err != nil:
				what = "failed"
			case c.verdict.ok:
				if what = "admitted"; w.m.key == "" { // without Redis the machine is the server
					w.granted = append(w.granted, part{w.micros, c.n})
				}
			}
			w.log = append(w.log, fmt.Sprintf("%d %s", id, what))
		}
	}
}

// join adds a call.
func (w *world) join(id int, c *call) {
	w.calls[id] = c
	w.step(func(now waiting.Moment, out *waiting.Out) waiting.Moment {
		if w.m.Join(c, now, out) != waiting.Ended && w.ring == 0 {
			w.ring = now.Mono + time.Second
		}
		return now
	})
}

// leave withdraws a call that has not ended.
func (w *world) leave(id int) {
	if c := w.calls[id]; c != nil && !w.ended[id] {
		w.step(func(now waiting.Moment, out *waiting.Out) waiting.Moment {
			w.m.Leave(c, now, out)
			return now
		})
		w.ended[id] = true
	}
}

// advance moves the clock on, and makes the steps that are due meanwhile.
func (w *world) advance(d time.Duration) {
	for until := w.micros + d.Microseconds(); ; {
		at := until
		if w.wakeAt != 0 {
			at = min(at, w.wakeAt)
		}
		if w.ring != 0 {
			at = min(at, begin-1+w.ring.Microseconds())
		}
		w.micros = max(w.micros, at)
		w.step(func(now waiting.Moment, out *waiting.Out) waiting.Moment {
			if w.ring != 0 && now.Mono >= w.ring {
				w.ring = w.m.Expire(now, out)
			}
			return now
		})
		if w.micros >= until {
			return
		}
	}
}

// send builds the next batch, if one is wanted.
func (w *world) send() (b *flight) {
	if !w.next.Send {
		return nil
	}
	w.step(func(now waiting.Moment, out *waiting.Out) waiting.Moment {
		b, _ = w.m.Build(now, out)
		return now
	})
	return b
}

// decide is what the server does with a batch: lua/apply.lua, without refunds of other processes.
func (w *world) decide(b *flight) []string {
	s, r := &w.store, &w.m.rule
	now := s.advance(r, w.micros)
	for _, p := range b.refunds {
		n := s.remove(r, p.last, p.count)
		for i := range w.granted {
			if g := &w.granted[i]; n > 0 && r.index(g.last) == r.index(p.last) {
				k := min(n, g.count)
				g.count, n = g.count-k, n-k
			}
		}
	}
	granted := ""
	for _, a := range b.asked {
		fit := min(a.times, max(0, (w.m.limit-s.used(r, now))/a.n))
		if fit > 0 {
			s.add(r, fit*a.n)
			w.granted = append(w.granted, part{now, fit * a.n})
		}
		granted += " " + decimal(fit)
	}
	text := (&state{epoch: 7, seen: now, parts: s.list()}).String()
	return []string{decimal(w.micros) + " " + decimal(now), text, strings.TrimSpace(granted)}
}

// land settles a batch.
func (w *world) land(b *flight, reply []string, how waiting.Landing) {
	w.step(func(now waiting.Moment, out *waiting.Out) waiting.Moment {
		var err error
		if how != waiting.Replied {
			err = fmt.Errorf("%w: of the script", ErrStoreUnavailable)
		}
		w.m.Settle(b, reply, how, err, now, out)
		switch {
		case how == waiting.Failed || how == waiting.Overdue:
			w.pause, now.Pause = now.Mono+100*time.Millisecond, 100*time.Millisecond
			w.m.Outage(err, now, out)
		case w.m.fault != nil:
			now.Pause = 0
			w.m.Outage(nil, now, out)
		}
		return now
	})
}

// most returns the most permits that the server has admitted in any window.
func (w *world) most() (most int64) {
	for i, first := range w.granted {
		sum := int64(0)
		for _, p := range w.granted[i:] {
			if p.last <= first.last+w.m.rule.window {
				sum += p.count
			}
		}
		most = max(most, sum)
	}
	return most
}

// The scripts in testdata: what joins, what the server replies, and which calls end. A line is a word and its arguments:
//
//	limit L WINDOW RESOLUTION [fail|pass|share N]
//	most N          of calls may be queued
//	others N        permits are admitted to other processes
//	allow ID N | wait ID N | leave ID | advance DURATION
//	run DURATION    advance, while every batch is sent and replied to at once
//	send            the machine must want a batch; "idle" that it wants none
//	reply | lost    the batch is decided now and the reply arrives; it does not arrive
//	-> ID admitted|refused|failed …   the calls that have ended since the last such line; "->" alone: none
func TestMachineScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.script")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			var w *world
			var b *flight
			number := func(s string) int { n, err := strconv.Atoi(s); require.NoError(t, err); return n }
			duration := func(s string) time.Duration { d, err := time.ParseDuration(s); require.NoError(t, err); return d }
			for i, line := range strings.Split(string(text), "\n") {
				at := fmt.Sprintf("%s:%d: %s", file, i+1, line)
				line, _, _ = strings.Cut(line, "#")
				f := strings.Fields(line)
				if len(f) == 0 {
					continue
				}
				switch f[0] {
				case "limit":
					policy := FailClosed
					switch {
					case len(f) > 5:
						policy = LocalShare(number(f[5]))
					case len(f) > 4 && f[4] == "pass":
						policy = FailOpen
					}
					w = newWorld(int64(number(f[1])), duration(f[2]), duration(f[3]), policy, 1)
				case "most":
					w.m.policy.waiters = number(f[1])
				case "others":
					w.store.advance(&w.m.rule, w.micros)
					require.True(t, w.store.add(&w.m.rule, int64(number(f[1]))))
				case "allow", "wait":
					w.join(number(f[1]), &call{n: int64(number(f[2])), waits: f[0] == "wait"})
				case "leave":
					w.leave(number(f[1]))
				case "advance":
					w.advance(duration(f[1]))
				case "run":
					for left := duration(f[1]); left > 0; left -= time.Millisecond {
						w.advance(time.Millisecond)
						if b := w.send(); b != nil {
							w.land(b, w.decide(b), waiting.Replied)
						}
					}
				case "send":
					b = w.send()
					require.NotNil(t, b, at)
				case "idle":
					require.Nil(t, w.send(), at)
				case "reply":
					w.land(b, w.decide(b), waiting.Replied)
				case "lost":
					w.land(b, nil, waiting.Failed)
				case "->":
					require.Equal(t, strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "->")), strings.Join(w.log, ", "), at)
					w.log = nil
				default:
					t.Fatal(at)
				}
			}
		})
	}
}

// history runs a random world, and returns a hash of what happened.
func history(t *testing.T, seed uint64) uint64 {
	r := rand.New(rand.NewPCG(seed, 39))
	limit := 1 + r.Int64N(9)
	policies := []FailurePolicy{FailClosed, FailOpen, LocalShare(2)}
	outages := r.IntN(3) == 0
	w := newWorld(limit, time.Second, 100*time.Millisecond, policies[r.IntN(3)], seed)
	if !outages && r.IntN(3) == 0 {
		w.m.key = ""
	}
	var b *flight
	var reply []string
	for id := range 60 {
		switch r.IntN(7) {
		case 0, 1, 2:
			w.join(id, &call{n: 1 + r.Int64N(limit), waits: r.IntN(2) == 0})
		case 3:
			w.leave(r.IntN(id + 1))
		default:
			w.advance(time.Duration(r.Int64N(int64(150 * time.Millisecond))).Truncate(time.Microsecond))
		}
		if b == nil {
			if b, reply = w.send(), nil; b != nil && (!outages || r.IntN(4) > 0) {
				reply = w.decide(b)
			}
		} else if r.IntN(2) == 0 {
			how := waiting.Replied
			if reply == nil {
				how = waiting.Failed
			}
			w.land(b, reply, how)
			b = nil
		}
	}
	if b != nil && reply != nil {
		w.land(b, reply, waiting.Replied)
	} else if b != nil {
		w.land(b, nil, waiting.Failed)
	}
	if !outages {
		require.LessOrEqual(t, w.most(), limit, "seed %d", seed)
	}
	for id := range 60 { // all leave; then nothing is left behind
		w.leave(id)
	}
	for range 100 {
		if w.advance(300 * time.Millisecond); w.next.Send {
			if b := w.send(); b != nil {
				w.land(b, w.decide(b), waiting.Replied)
			}
		}
	}
	require.Zero(t, w.m.queue.pending, "seed %d", seed)
	require.Zero(t, w.m.queue.live()+w.m.line.live()+w.m.called, "seed %d", seed)
	h := fnv.New64a()
	_, _ = h.Write([]byte(strings.Join(w.log, ",")))
	_ = binary.Write(h, binary.LittleEndian, w.micros)
	for _, p := range w.granted {
		_ = binary.Write(h, binary.LittleEndian, p)
	}
	return h.Sum64()
}

// Ten thousand random worlds: never more than the limit in a window, nothing is left behind by calls that have gone, and each runs twice
// in the same way.
func TestWorlds(t *testing.T) {
	worlds := uint64(500)
	if (os.Getenv("CI") != "" || os.Getenv("TOKENBUCKET_LONG") != "") && !redistest.Raced { // one goroutine: there is no race
		worlds = 10_000
	}
	for seed := range worlds {
		require.Equal(t, history(t, seed), history(t, seed), "seed %d", seed)
	}
}
