package state

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// A ledger holds every state of every bucket that any of the servers wrote, by MONITOR. So it has the permits, too, whose callers never got
// the reply. Times in it are the servers'.
type ledger struct {
	mu    sync.Mutex
	pages map[string]map[string][]entry // by bucket's key and server
	order []string                      // of servers
	heard int64                         // the last mark that a server has shown
	marks int64
}

// entry is one write. Own distinguishes it from a master's write that a replica has received.
type entry struct {
	tokenbucket.PermitBucket
	text string
	own  bool
}

func newLedger() *ledger { return &ledger{pages: map[string]map[string][]entry{}} }

// watch begins to note what a server writes, until the test ends. A server that dies, or throws out its clients as a sentinel
// has it do, is watched again at once; what it wrote in between shows in the next state that is seen.
func (l *ledger) watch(t *testing.T, addr string) {
	t.Helper()
	l.order = append(l.order, addr)
	ctx, cancel := context.WithCancel(background)
	begun, done := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		begin := sync.OnceFunc(func() { close(begun) })
		for ctx.Err() == nil {
			l.monitor(ctx, t, addr, begin)
			time.Sleep(time.Millisecond)
		}
	}()
	select {
	case <-begun:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s cannot be watched", addr)
	}
}

// monitor notes what a server writes for as long as the connection lasts.
func (l *ledger) monitor(ctx context.Context, t *testing.T, addr string, begin func()) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write([]byte("MONITOR\r\n")); err != nil {
		return
	}
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		switch line := lines.Text(); {
		case line == "+OK":
			begin()
		case strings.Contains(line, `"tb1 `):
			l.note(t, addr, line)
		case strings.Contains(line, `"PING" "mark `):
			l.hear(line)
		}
	}
}

func (l *ledger) hear(line string) {
	_, text, _ := strings.Cut(line, `"mark `)
	n, _ := strconv.ParseInt(strings.TrimSuffix(text, `"`), 10, 64)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard = max(l.heard, n)
}

// settle waits until all is noted that the servers which answer have written so far: MONITOR shows a PING that came later.
func (l *ledger) settle(t *testing.T) {
	t.Helper()
	for _, addr := range l.order {
		l.marks++
		ping := fmt.Appendf(nil, "PING \"mark %d\"\r\n", l.marks)
		require.NoError(t, redistest.Poll(20*time.Second, func() error {
			conn, err := net.DialTimeout("tcp", addr, time.Second)
			if err != nil {
				return nil // it is dead
			}
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(time.Second))
			if _, err = conn.Write(ping); err == nil {
				_, err = bufio.NewReader(conn).ReadString('\n')
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if err == nil && l.heard < l.marks {
				err = errors.New("MONITOR lags behind")
			}
			return err
		}), addr)
	}
}

// note reads a line such as
//
//	+1700000000.123456 [0 lua] "SET" "tokenbucket:{x}" "tb1 epoch=…" "KEEPTTL"
func (l *ledger) note(t *testing.T, addr, line string) {
	head, rest, _ := strings.Cut(line, "] ")
	var args []string
	for rest != "" {
		quoted, err := strconv.QuotedPrefix(rest)
		if err != nil {
			t.Errorf("line of MONITOR: %q: %v", line, err)
			return
		}
		arg, err := strconv.Unquote(quoted)
		if err != nil {
			t.Errorf("line of MONITOR: %q: %v", line, err)
			return
		}
		args, rest = append(args, arg), strings.TrimPrefix(rest[len(quoted):], " ")
	}
	if len(args) < 3 || !strings.EqualFold(args[0], "SET") {
		return // the script's own call, of which the SET is a line of its own
	}
	e := entry{text: args[2], own: strings.HasSuffix(head, " lua")}
	if err := e.PermitBucket.UnmarshalText([]byte(e.text)); err != nil {
		t.Errorf("a server wrote %q: %v", e.text, err)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pages[args[1]] == nil {
		l.pages[args[1]] = map[string][]entry{}
	}
	l.pages[args[1]][addr] = append(l.pages[args[1]][addr], e)
}

// account is what a ledger says of one bucket from which permits are taken one at a time.
type account struct {
	due    []faultlab.Event // when each permit that was taken fell due
	from   []int64          // and since when it may have been used, if places moved up in the same batch
	begun  []float64        // the permits with which each new life of the bucket began
	gained []float64        // and how much more that was than the life before it had left
	forked []faultlab.Event // the permits taken, and when, from states that did not survive
	given  int              // permits given back
	reigns int              // how often a server was the master of those who write here
}

// extra is what may be used above the bound of a bucket that nothing befell.
func (a *account) extra() float64 {
	sum := float64(a.forkedSince(0))
	for _, g := range a.gained {
		sum += g
	}
	return sum
}

// forkedSince returns the number of permits taken since a moment from states that did not survive.
func (a *account) forkedSince(moment int64) (n int) {
	for _, f := range a.forked {
		if f.At >= moment {
			n += f.Permits
		}
	}
	return n
}

// worth is what a bucket holds at a time, in permits; debt counts below zero. It is not capped at what the bucket can hold.
func worth(b *tokenbucket.PermitBucket, now int64) float64 {
	return b.StoredPermits + (float64(now-b.NextFreeTicketMicros)+b.CarryMicros)/b.IntervalMicros
}

// account closes the account of a bucket. On one that moves between masters (moved) all writes are one history; otherwise each server has
// its own, and may begin where a master's ended.
func (l *ledger) account(t *testing.T, key string, moved bool) *account {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	pages := make([][]entry, 0, len(l.order))
	for _, addr := range l.order {
		pages = append(pages, slices.Clone(l.pages[key][addr]))
	}
	if moved {
		all := slices.DeleteFunc(slices.Concat(pages...), func(e entry) bool { return !e.own })
		slices.SortStableFunc(all, func(a, b entry) int { return int(a.Seq - b.Seq) })
		for i := range all[1:] {
			require.Less(t, all[i].Seq, all[i+1].Seq, "one state follows another: %s, %s", all[i].text, all[i+1].text)
		}
		pages = [][]entry{all}
	}
	a := new(account)
	for i, page := range pages {
		a.add(page)
		for k := range page {
			if page[k].own && (k == 0 || !page[k-1].own) {
				a.reigns++
			}
		}
		a.fork(page, slices.Concat(pages[:i]...))
	}
	slices.Sort(a.from)
	return a
}

// add goes through one server's page. The worth of a bucket falls by one with each permit that is taken, whatever the other numbers in it
// are. A new life is recognised by its epoch, unless the bucket was full, which begins an epoch too but goes on counting. Of a place that
// is refunded late only a part may come back: the rest of the permit has lapsed, and no caller uses it.
func (a *account) add(page []entry) {
	var was *tokenbucket.PermitBucket
	for i := range page {
		b, now := &page[i].PermitBucket, page[i].SeenMicros
		if !page[i].own {
			was = b
			continue
		}
		taken, held, part := int(b.Seq-1), 0.0, false
		if was != nil {
			held = worth(was, now)
		}
		switch {
		case was == nil:
		case b.Epoch != was.Epoch && (held < b.MaxPermits || b.Seq <= was.Seq):
			first := worth(b, now) + float64(taken)
			a.begun = append(a.begun, first)
			a.gained = append(a.gained, max(0, first-held))
		default:
			spent := min(held, b.MaxPermits) - worth(b, now)
			taken = int(math.Floor(spent + 1e-3))
			part = spent-float64(taken) > 1e-3
		}
		was = b
		for k := range taken {
			at := float64(b.NextFreeTicketMicros) - b.CarryMicros - float64(taken-1-k)*b.IntervalMicros
			if held > 0 {
				at = max(at, float64(now))
			}
			a.due = append(a.due, faultlab.Event{At: int64(math.Ceil(at)), Permits: 1})
			if part {
				at -= b.IntervalMicros
			}
			a.from = append(a.from, int64(at))
		}
		if taken < 0 { // refunded: the waiters for the last of them do not use them
			a.given -= taken
			a.due, a.from = a.due[:max(0, len(a.due)+taken)], a.from[:max(0, len(a.from)+taken)]
		}
	}
}

// fork counts the permits taken elsewhere from the state that this server took over, or from a later one.
func (a *account) fork(page, elsewhere []entry) {
	first := slices.IndexFunc(page, func(e entry) bool { return e.own })
	if first < 1 {
		return
	}
	from := slices.IndexFunc(elsewhere, func(e entry) bool { return e.own && e.text == page[first-1].text })
	if from < 0 {
		return
	}
	for i := from + 1; i < len(elsewhere); i++ {
		if was, b := &elsewhere[i-1].PermitBucket, &elsewhere[i].PermitBucket; elsewhere[i].own {
			n := math.Round(min(worth(was, b.SeenMicros), b.MaxPermits) - worth(b, b.SeenMicros))
			a.forked = append(a.forked, faultlab.Event{At: b.SeenMicros, Permits: int(n)})
		}
	}
}

// unearned counts the uses that no permit of their own allows: one that was due by then. Both clocks are this machine's, read
// through different channels.
func (a *account) unearned(used []int64) (n int) {
	const slack = 2000 // microseconds
	used = slices.Sorted(slices.Values(used))
	next := 0
	for _, at := range used {
		if next < len(a.from) && a.from[next] <= at+slack {
			next++
		} else {
			n++
		}
	}
	return n
}
