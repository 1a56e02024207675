package semaphore

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// grant is permits that were held, as the server's commands show it. Times are the server's.
type grant struct {
	ID, Label string
	N         int
	Fence     int64
	From      int64
	Expires   int64 // as last renewed
	Removed   int64 // 0: not yet
	Renewed   int
}

// Until is when it was no longer held.
func (g *grant) Until() int64 {
	if g.Removed == 0 || g.Expires < g.Removed {
		return g.Expires
	}
	return g.Removed
}

// truth follows all commands that the server executes (MONITOR), including those of scripts, and keeps its own account of the holders of
// one semaphore: the members of the set "held", or of the field "quiet" of the state, with an expiry to come. It does not use the counts of
// the scripts.
type truth struct {
	name    string
	permits int
	own     map[string]int // by label: how many may be held when a process is granted one; in the place of permits

	mu      sync.Mutex
	held    map[string]*grant
	grants  []*grant         // in their order
	asked   map[string]int64 // when an id was first seen
	most    int
	moves   int
	wrong   []string
	stopped error
}

// monitor begins to follow. The commands of several semaphores come from one connection.
func monitor(t *testing.T, addr string, all ...spec) map[string]*truth {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	lines := bufio.NewReaderSize(conn, 1<<20)
	_, err = io.WriteString(conn, "MONITOR\r\n")
	require.NoError(t, err)
	ok, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "+OK\r\n", ok)
	truths, byKey := map[string]*truth{}, map[string]*truth{}
	done := make(chan struct{})
	for _, s := range all {
		m := &truth{name: s.Name, permits: s.Permits, held: map[string]*grant{}, asked: map[string]int64{}}
		truths[s.Name] = m
		for _, part := range []string{"held", "info", "queue", "state"} {
			byKey[base(s.Name)+part] = m
		}
	}
	go func() {
		defer close(done)
		decided := int64(0) // when the script under way read the clock
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				for _, m := range truths {
					m.mu.Lock()
					m.stopped = err
					m.mu.Unlock()
				}
				return
			}
			at, words := parseCommand(line)
			if len(words) == 1 && strings.EqualFold(words[0], "time") {
				decided = at
			}
			if len(words) > 2 {
				if m := byKey[words[1]]; m != nil {
					m.mu.Lock()
					m.see(decided, strings.ToLower(words[0]), words[1][len(base(m.name)):], words[2:])
					m.mu.Unlock()
				}
			}
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	return truths
}

// parseCommand reads a line of MONITOR: +seconds.micros [db source] "word" "word"...
func parseCommand(line string) (at int64, words []string) {
	line = strings.TrimSpace(strings.TrimPrefix(line, "+"))
	stamp, rest, _ := strings.Cut(line, " ")
	seconds, fraction, _ := strings.Cut(stamp, ".")
	s, _ := strconv.ParseInt(seconds, 10, 64)
	us, _ := strconv.ParseInt(fraction, 10, 64)
	source, rest, _ := strings.Cut(rest, "] ")
	if !strings.HasSuffix(source, " lua") { // only what changes state: all that is done by scripts
		return 0, nil
	}
	for rest != "" {
		word, err := strconv.QuotedPrefix(rest)
		if err != nil {
			return 0, nil
		}
		plain, _ := strconv.Unquote(word)
		words = append(words, plain)
		rest = strings.TrimPrefix(rest[len(word):], " ")
	}
	return s*1_000_000 + us, words
}

// see takes note of a command of a script that read the clock at that time. mu is held.
func (m *truth) see(at int64, command, part string, args []string) {
	m.moves++
	switch {
	case part == "state" && command == "hset":
		for i := 0; i+1 < len(args); i += 2 {
			if fields := strings.Fields(args[i+1]); args[i] == "permits" && len(fields) == 3 && fields[1] != "0" {
				m.permits, _ = strconv.Atoi(fields[1]) // format limit version
			}
			if args[i] == "quiet" {
				m.quiet(at, args[i+1])
			}
		}
	case part == "queue" && command == "zadd":
		for i := 0; i+1 < len(args); i += 2 {
			m.ask(at, args[i+1])
		}
	case part == "held" && command == "zadd":
		for i := 0; i+1 < len(args); i += 2 {
			expires, _ := strconv.ParseInt(args[i], 10, 64)
			m.holds(at, args[i+1], expires)
		}
	case part == "info" && command == "hset":
		for i := 0; i+1 < len(args); i += 2 {
			fields := strings.SplitN(args[i+1], " ", 5) // permits process fence since label
			if len(fields) != 5 {
				continue
			}
			n, _ := strconv.Atoi(fields[0])
			fence, _ := strconv.ParseInt(fields[2], 10, 64)
			m.granted(at, args[i], n, fence, fields[4])
		}
	case part == "held" && command == "zrem":
		for _, id := range args {
			m.gone(at, id)
		}
	}
}

// quiet records the holders while no request waits: after 64 bytes, and '\nprocess ' name '\0' and 16 bytes of each process, come '\nholder
// ' id '\0' label '\0' and the numbers permits, expires, fence, since of each holder.
func (m *truth) quiet(at int64, text string) {
	number := func(i int) int64 { return int64(math.Float64frombits(binary.LittleEndian.Uint64([]byte(text[8*i:])))) }
	const head = 64
	if len(text) < head {
		m.fail("the quiet state is %q", text)
		return
	}
	held := map[string]bool{}
	for text = text[head:]; text != ""; {
		if rest, ok := strings.CutPrefix(text, "\nprocess "); ok {
			_, text, _ = strings.Cut(rest, "\x00")
			text = text[16:]
			continue
		}
		rest, ok := strings.CutPrefix(text, "\nholder ")
		if !ok {
			m.fail("there is %q in the quiet state", text)
			return
		}
		var id, label string
		id, text, _ = strings.Cut(rest, "\x00")
		label, text, _ = strings.Cut(text, "\x00")
		held[id] = true
		m.holds(at, id, number(1))
		m.granted(at, id, int(number(0)), number(2), label)
		text = text[32:]
	}
	for id := range m.held {
		if !held[id] {
			m.gone(at, id)
		}
	}
}

// holds notes that the lease of an id ends then.
func (m *truth) holds(at int64, id string, expires int64) {
	g := m.held[id]
	if g != nil && g.Expires == expires {
		return
	}
	if g != nil && g.Expires > at-1000 { // the script's clock may be some microseconds before what MONITOR shows of it
		g.Expires, g.Renewed = expires, g.Renewed+1
		return
	}
	if g != nil {
		m.fail("%s was renewed %v after it had expired", g.ID, micros(at-g.Expires))
	}
	m.ask(at, id)
	m.held[id] = &grant{ID: id, From: at, Expires: expires}
}

// granted records the grant to an id that has a lease, the first time that it appears.
func (m *truth) granted(at int64, id string, n int, fence int64, label string) {
	g := m.held[id]
	if g == nil || g.Fence != 0 {
		return
	}
	g.N, g.Fence, g.Label = n, fence, label
	if n := len(m.grants); n > 0 && m.grants[n-1].Fence >= g.Fence {
		m.fail("fence %d of %s follows %d", g.Fence, g.ID, m.grants[n-1].Fence)
	}
	m.grants = append(m.grants, g)
	sum := 0
	for _, h := range m.held {
		if h.Expires > at {
			sum += h.N
		}
	}
	m.most = max(m.most, sum)
	permits := m.permits
	if own, ok := m.own[g.Label]; ok {
		permits = own
	}
	if sum > permits {
		m.fail("%d held of %d after the grant of %s", sum, permits, g.ID)
	}
}

// gone notes that an id holds nothing any more.
func (m *truth) gone(at int64, id string) {
	if g := m.held[id]; g != nil {
		g.Removed = at
		delete(m.held, id)
	}
}

func (m *truth) ask(at int64, id string) {
	if _, ok := m.asked[id]; !ok {
		m.asked[id] = at
	}
}

func (m *truth) fail(format string, args ...any) {
	if len(m.wrong) < 20 {
		m.wrong = append(m.wrong, fmt.Sprintf(format, args...))
	}
}

// end waits until all that has happened is seen: nothing more does.
func (m *truth) end(t *testing.T) {
	t.Helper()
	for last := -1; ; {
		m.mu.Lock()
		moves, stopped := m.moves, m.stopped
		m.mu.Unlock()
		require.NoError(t, stopped, "the monitor was cut off")
		if moves == last {
			return
		}
		last = moves
		time.Sleep(100 * time.Millisecond)
	}
}

// The account does count: three grants of two permits, a renewal after the end, a fence that falls.
func TestTruthIsNoticed(t *testing.T) {
	m := &truth{permits: 2, held: map[string]*grant{}, asked: map[string]int64{}}
	do := func(at int64, line string) {
		stamp, words := parseCommand(fmt.Sprintf("+0.%06d [0 lua] %s\r\n", at, line))
		require.Equal(t, at, stamp)
		m.see(stamp, strings.ToLower(words[0]), words[1], words[2:])
	}
	do(10, `"ZADD" "held" "50" "a"`)
	do(10, `"HSET" "info" "a" "1 p 7 10 a \"label\""`)
	do(20, `"ZADD" "held" "70" "b"`)
	do(20, `"HSET" "info" "b" "1 p 8 20 label"`)
	do(30, `"ZADD" "held" "90" "a"`)
	require.Empty(t, m.wrong)
	require.Equal(t, 2, m.most)
	do(60, `"ZADD" "held" "99" "c"`)
	do(60, `"HSET" "info" "c" "1 p 9 60 label"`)
	require.Len(t, m.wrong, 1)
	do(2095, `"ZADD" "held" "3000" "a"`)
	require.Len(t, m.wrong, 2)
	do(2096, `"ZREM" "held" "a"`)
	do(2097, `"ZADD" "held" "3000" "d"`)
	do(2097, `"HSET" "info" "d" "1 p 9 97 label"`)
	require.Len(t, m.wrong, 3)
	require.Equal(t, `a "label"`, m.grants[0].Label)
	quiet := func(ids ...string) string {
		text := strings.Repeat("\x00", 64) + "\nprocess p\x00" + strings.Repeat("\x00", 16)
		for i, id := range ids {
			text += "\nholder " + id + "\x00label\x00"
			for _, n := range []int{1, 4000, 20 + i, 0} {
				text += string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(float64(n))))
			}
		}
		return text
	}
	m.see(2100, "hset", "state", []string{"quiet", quiet()})
	require.Empty(t, m.held)
	m.see(2101, "hset", "state", []string{"quiet", quiet("e", "f")})
	m.see(2102, "hset", "state", []string{"quiet", quiet("e", "f")})
	require.Len(t, m.wrong, 3)
	require.Equal(t, "label", m.grants[len(m.grants)-1].Label)
	m.see(2103, "hset", "state", []string{"quiet", quiet("e", "f", "g")})
	require.Len(t, m.wrong, 4)
	do(2104, `"ZREM" "held" "e" "f" "g"`)
	do(2105, `"ZADD" "held" "3000" "h" "3001" "i" "3002" "j"`)
	do(2105, `"HSET" "info" "h" "1 p 100 2105 label" "i" "1 p 101 2105 label" "j" "1 p 102 2105 label"`)
	require.Len(t, m.wrong, 5)
	require.Equal(t, "j", m.grants[len(m.grants)-1].ID)
	at, words := parseCommand("+1.000002 [0 127.0.0.1:5] \"GET\" \"x\"")
	require.Zero(t, at)
	require.Empty(t, words)
}
