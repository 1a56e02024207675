package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// decision returns the new states of a batch, as Decide does.
type decision = func(nowMicros int64, states [][]byte) (next [][]byte, ttl time.Duration, err error)

func batch(decide decision, names ...string) *tokenbucket.Batch {
	return &tokenbucket.Batch{Names: names, Decide: decide}
}

const (
	patience = 30 * time.Second // for one step
	day      = 24 * time.Hour
)

// step applies a batch, which must not fail.
func step(t testing.TB, s tokenbucket.Store, decide decision, names ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Apply(ctx, batch(decide, names...)); err != nil {
		t.Error(err)
	}
}

// read returns the states of names, and the time of the store's clock.
func read(t testing.TB, s tokenbucket.Store, names ...string) (states []string, missing []bool, now int64) {
	t.Helper()
	step(t, s, func(at int64, found [][]byte) ([][]byte, time.Duration, error) {
		if len(found) != len(names) {
			return nil, 0, fmt.Errorf("%d states for %d names", len(found), len(names))
		}
		states, missing, now = nil, nil, at
		for _, state := range found {
			states, missing = append(states, string(state)), append(missing, state == nil)
		}
		return make([][]byte, len(names)), 0, nil
	}, names...)
	return states, missing, now
}

// write puts states under names, each followed by its state.
func write(t testing.TB, s tokenbucket.Store, ttl time.Duration, namesAndStates ...string) {
	t.Helper()
	var names []string
	var next [][]byte
	for pair := range slices.Chunk(namesAndStates, 2) {
		names, next = append(names, pair[0]), append(next, []byte(pair[1]))
	}
	step(t, s, func(int64, [][]byte) ([][]byte, time.Duration, error) { return next, ttl, nil }, names...)
}

func missingState(t *testing.T, store func() tokenbucket.Store) {
	s := store()
	write(t, s, day, "there", "x")
	if _, missing, _ := read(t, s, "here", "there", "nowhere"); !slices.Equal(missing, []bool{true, false, true}) {
		t.Errorf("nil states: %v", missing)
	}
}

func bytesComeBack(t *testing.T, store func() tokenbucket.Store) {
	for i, state := range []string{"x", " a  b ", `'"\%_;--`, "line\nline\r\n\ttab", "é", strings.Repeat("0123456789", 100)} {
		name := fmt.Sprint("bytes", i)
		for _, state := range []string{"before", state} {
			write(t, store(), day, name, state)
			if got, _, _ := read(t, store(), name); got[0] != state {
				t.Errorf("wrote %q, read %q", state, got[0])
			}
		}
	}
}

func namesAreApart(t *testing.T, store func() tokenbucket.Store) {
	names := []string{"a", "A", "a:lock", "b:lock", "%7Ba%7D", "a%00", "a%20", "%shadow:a", "a_", "ab", "é", "e", strings.Repeat("n", 1545), "n"}
	s := store()
	for _, name := range names {
		write(t, s, day, name, "of "+name)
	}
	for _, name := range names {
		if got, _, _ := read(t, s, name); got[0] != "of "+name {
			t.Errorf("%q has the state %q", name, got[0])
		}
	}
}

// counting returns a decision that adds one to each state, and records the new value of the last.
func counting(last *int) decision {
	return func(_ int64, states [][]byte) ([][]byte, time.Duration, error) {
		next := make([][]byte, len(states))
		for i, state := range states {
			n := 0
			if state != nil {
				var err error
				if n, err = strconv.Atoi(string(state)); err != nil {
					return nil, 0, err
				}
			}
			*last = n + 1
			next[i] = strconv.AppendInt(nil, int64(n+1), 10)
		}
		return next, day, nil
	}
}

// processes runs a function in several goroutines, each with a store of its own.
func processes(n int, store func() tokenbucket.Store, run func(p int, s tokenbucket.Store)) {
	var all sync.WaitGroup
	for p := range n {
		s := store()
		all.Go(func() { run(p, s) })
	}
	all.Wait()
}

// Eight processes count under one name. Each step is decided on the state that the one before wrote; a store may call Decide repeatedly.
func oneStepAtATime(t *testing.T, store func() tokenbucket.Store) {
	const steps = 30
	var mu sync.Mutex
	var counted []int
	processes(8, store, func(_ int, s tokenbucket.Store) {
		for range steps {
			last := 0
			step(t, s, counting(&last), "x")
			mu.Lock()
			counted = append(counted, last)
			mu.Unlock()
		}
	})
	slices.Sort(counted)
	for i, n := range counted {
		if n != i+1 {
			t.Fatalf("step %d of %d left %d", i+1, len(counted), n)
		}
	}
}

// Six processes move amounts between three names, in every order. The sum is the same at every moment.
func severalNames(t *testing.T, store func() tokenbucket.Store) {
	const sum = 300
	names := []string{"a", "b", "c"}
	write(t, store(), day, "a", "100", "b", "100", "c", "100")
	total := func(states [][]byte) (all int, err error) {
		for _, state := range states {
			n, bad := strconv.Atoi(string(state))
			all, err = all+n, errors.Join(err, bad)
		}
		return all, err
	}
	processes(6, store, func(p int, s tokenbucket.Store) {
		mine := []string{names[p%3], names[(p+1)%3], names[(p+2)%3]}
		if p%2 == 0 {
			slices.Reverse(mine)
		}
		for range 20 {
			step(t, s, func(_ int64, states [][]byte) ([][]byte, time.Duration, error) {
				if all, err := total(states); all != sum || err != nil {
					return nil, 0, fmt.Errorf("%q add up to %d, want %d: %v", states, all, sum, err)
				}
				from, _ := strconv.Atoi(string(states[0]))
				to, _ := strconv.Atoi(string(states[1]))
				return [][]byte{[]byte(strconv.Itoa(from - 1)), []byte(strconv.Itoa(to + 1)), nil}, day, nil
			}, mine...)
		}
	})
	states, _, _ := read(t, store(), names...)
	if all, err := total([][]byte{[]byte(states[0]), []byte(states[1]), []byte(states[2])}); all != sum || err != nil {
		t.Errorf("%q add up to %d, want %d: %v", states, all, sum, err)
	}
}

func untouchedStays(t *testing.T, store func() tokenbucket.Store) {
	s := store()
	write(t, s, day, "a", "1", "b", "2")
	step(t, s, func(int64, [][]byte) ([][]byte, time.Duration, error) {
		return [][]byte{nil, []byte("3"), nil}, day, nil
	}, "a", "b", "c")
	step(t, s, func(int64, [][]byte) ([][]byte, time.Duration, error) { return make([][]byte, 3), 0, nil }, "a", "b", "c")
	if states, missing, _ := read(t, s, "a", "b", "c"); !slices.Equal(states, []string{"1", "3", ""}) || !missing[2] {
		t.Errorf("states %q", states)
	}
}

func failedDecision(t *testing.T, store func() tokenbucket.Store) {
	wrong := errors.New("wrong")
	s := store()
	write(t, s, day, "a", "1")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := s.Apply(ctx, batch(func(int64, [][]byte) ([][]byte, time.Duration, error) {
		return [][]byte{[]byte("2"), []byte("2")}, day, wrong
	}, "a", "b"))
	if !errors.Is(err, wrong) {
		t.Errorf("the error is %v, want what Decide returned", err)
	}
	if states, missing, _ := read(t, s, "a", "b"); states[0] != "1" || !missing[1] {
		t.Errorf("states %q", states)
	}
	write(t, s, day, "a", "3") // and no lock is left
}

// The result of the last call of Decide is written.
func lastDecision(t *testing.T, store func() tokenbucket.Store) {
	processes(4, store, func(p int, s tokenbucket.Store) {
		own := fmt.Sprint("own", p)
		for i := range 15 {
			last := ""
			step(t, s, func(now int64, states [][]byte) ([][]byte, time.Duration, error) {
				last = fmt.Sprint(p, " ", i, " ", now, " ", len(last))
				return [][]byte{[]byte(last), []byte(last)}, day, nil
			}, "all", own)
			if got, _, _ := read(t, s, own); got[0] != last {
				t.Errorf("wrote %q, the last decision was %q", got[0], last)
			}
		}
	})
}

// A state lives for its time to live after its last write.
func timeToLive(t *testing.T, store func() tokenbucket.Store) {
	s := store()
	write(t, s, time.Second, "renewed", "1", "left", "1")
	write(t, s, 365*day, "renewed", "2", "long", "1")
	if states, _, _ := read(t, s, "left"); states[0] != "1" {
		t.Error("a state has expired before its time to live")
	}
	time.Sleep(1200 * time.Millisecond)
	if states, _, _ := read(t, s, "renewed", "long"); states[0] != "2" || states[1] != "1" {
		t.Errorf("states %q", states)
	}
}

// The clock counts microseconds, and does not run backwards between steps, whichever process makes them.
func clockMovesOn(t *testing.T, store func() tokenbucket.Store) {
	_, _, first := read(t, store(), "x")
	began := time.Now()
	time.Sleep(100 * time.Millisecond)
	_, _, second := read(t, store(), "x")
	if passed := time.Duration(second-first) * time.Microsecond; passed < 50*time.Millisecond || passed > 2*time.Since(began)+10*time.Second {
		t.Errorf("100 ms are %v by the store's clock", passed)
	}
	processes(4, store, func(_ int, s tokenbucket.Store) {
		for range 20 {
			step(t, s, func(now int64, states [][]byte) ([][]byte, time.Duration, error) {
				if was, _ := strconv.ParseInt(string(states[0]), 10, 64); now < was {
					t.Errorf("time went from %d to %d", was, now)
				}
				return [][]byte{strconv.AppendInt(nil, now, 10)}, day, nil
			}, "time")
		}
	})
}

// A batch whose context has ended either fails and writes nothing, or succeeds and is written.
func doneContext(t *testing.T, store func() tokenbucket.Store) {
	write(t, store(), day, "x", "1")
	ctx, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	want := "2"
	if err := store().Apply(ctx, batch(func(int64, [][]byte) ([][]byte, time.Duration, error) { return [][]byte{[]byte("2")}, day, nil }, "x")); err != nil {
		want = "1"
	}
	if got, _, _ := read(t, store(), "x"); got[0] != want {
		t.Errorf("state %q, want %q", got[0], want)
	}
}
