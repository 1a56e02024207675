package rows

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// text is the content of a row in a script: "5/s", "off", or any other word. What follows a + is not kept in buckets.
type text string

func (t text) Same(o text) bool       { return t == o }
func (t text) SameBucket(o text) bool { return before(t) == before(o) }
func (t text) Off() bool              { return t == "off" }

func before(t text) string { b, _, _ := strings.Cut(string(t), "+"); return b }

// script runs a script of testdata. Its lines are
//
//	policy losses are never accepted
//	load a=5/s b=7/s@30#2 bad:c#3 bad:?     a row of b with the time 30 and the key 2; rows that are bad, the last without a name
//	differs a=30                            the next load finds that version in the bucket of a, with another content; 30+2 is made up
//	load fails
//	fails a rate                            a call of the bucket a, or of the key a:k, fails as a fault does
//	passes a                                a call of the bucket passes
//	readable a rate                         its state could be read
//	confirm
//	wait 25h
//	switch off by ann                       a look at the switch a second after the line before; "switch on"
//	→ a 5/s, b 7/s (held)                   what is in force then; or the bucket's version: a 5/s @30+1
//	→ lost 2 of 3: a b, held                the loss; "no loss"
//	→ switch: switch off, off for 0s by ann  the effect of the last look, and since when the switch is off
//	→ faults a rate: 2 calls in 1m0s, idle  what an operator must repair; "no faults"
//	→ events a ended                        what the last load has changed
//	→ twins a#1                             rows of the last load that do not count, since another of their name does
type script struct {
	*Machine[text]
	now     time.Time
	differs map[string]int64
	effect  Kind
	faults  Faults[string, string]
	table   Table[text]
	last    Step[text]
}

func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		f, err := os.Open(file)
		require.NoError(t, err)
		var s *script
		lines := bufio.NewScanner(f)
		for n := 1; lines.Scan(); n++ {
			line, _, _ := strings.Cut(lines.Text(), "//")
			at := fmt.Sprintf("%s:%d: %s", file, n, line)
			verb, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
			switch rest = strings.TrimSpace(rest); verb {
			case "":
			case "==":
				s = &script{Machine: New[text](AfterLoads), now: time.Unix(0, 0), differs: map[string]int64{}}
			case "policy":
				s.policy = map[string]Policy{"at once": AtOnce, "once confirmed": OnceConfirmed}[rest]
			case "load":
				s.now = s.now.Add(time.Second)
				s.load(t, at, rest)
			case "differs":
				name, version, _ := strings.Cut(rest, "=")
				s.differs[name] = parse(t, version)
			case "confirm":
				s.Confirm()
			case "switch":
				position, origin, _ := strings.Cut(rest, " by ")
				s.now = s.now.Add(time.Second)
				s.effect = s.Look(s.now, map[string]Switch{"on": On, "off": Off}[position], origin)
			case "fails":
				bucket, by, _ := strings.Cut(rest, " ")
				row, _, _ := strings.Cut(bucket, ":")
				s.faults.Failed(s.now, row, bucket, by, "")
			case "passes":
				s.faults.Passed(rest)
			case "readable":
				for _, f := range s.faults.Present(func(f *Fault[string, string]) bool { return f.Bucket+" "+f.By == rest }) {
					s.faults.Readable(&f)
				}
			case "wait":
				d, err := time.ParseDuration(rest)
				require.NoError(t, err, at)
				s.now = s.now.Add(d)
			case "→":
				s.expect(t, at, rest)
			default:
				t.Fatal(at)
			}
		}
		require.NoError(t, lines.Err())
		require.NoError(t, f.Close())
	}
}

// parse reads 30 or 30+2.
func parse(t *testing.T, version string) int64 {
	given, made, _ := strings.Cut(version, "+")
	v, err := strconv.ParseInt(given, 10, 64)
	require.NoError(t, err)
	m, _ := strconv.ParseInt("0"+made, 10, 64)
	return Version(v) + m
}

func (s *script) load(t *testing.T, at, rows string) {
	if rows == "fails" {
		s.last.Events = nil
		if kind := s.Fail(s.now); kind != Nothing {
			s.last.Events = []Event[text]{{Kind: kind}}
		}
		return
	}
	table := Table[text]{Differs: s.differs}
	s.differs = map[string]int64{}
	for _, r := range strings.Fields(rows) {
		r, id, _ := strings.Cut(r, "#")
		if name, bad := strings.CutPrefix(r, "bad:"); bad {
			table.Bad = append(table.Bad, Bad{ID: id, Name: strings.Trim(name, "?")})
			continue
		}
		r, version, _ := strings.Cut(r, "@")
		name, content, ok := strings.Cut(r, "=")
		require.True(t, ok, at)
		v, _ := strconv.ParseInt("0"+version, 10, 64)
		table.Rows = append(table.Rows, Row[text]{name, id, v, text(content)})
	}
	s.table, s.last = table, s.Load(s.now, &table)
	s.faults.Loaded(func(f *Fault[string, string]) bool { return f.Row == "" || s.Rule(f.Row) != nil })
}

func (s *script) expect(t *testing.T, at, want string) {
	switch l := s.Loss(); {
	case want == "no faults":
		require.True(t, s.faults.None(), at)
	case strings.HasPrefix(want, "faults "):
		var is []string
		for _, f := range s.faults.Present(func(*Fault[string, string]) bool { return true }) {
			line := fmt.Sprintf("%s %s: %d calls in %v", f.Bucket, f.By, f.Calls, f.Last.Sub(f.Since))
			if f.Idle(s.now) {
				line += ", idle"
			}
			is = append(is, line)
		}
		require.Equal(t, want, "faults "+strings.Join(is, ", "), at)
	case want == "no loss":
		require.Zero(t, l, at)
	case strings.HasPrefix(want, "lost "):
		is := fmt.Sprintf("lost %d of %d: %s", len(l.Names), l.Before, strings.Join(l.Names, " "))
		if l.Off > 0 {
			is += fmt.Sprintf(", %d off", l.Off)
		}
		if l.Held {
			is += ", held"
		}
		require.Equal(t, want, is, at)
	case strings.HasPrefix(want, "switch: "):
		is := "switch: " + s.effect.String()
		if since, origin := s.Off(); !since.IsZero() {
			is += strings.TrimSuffix(fmt.Sprint(", off for ", s.now.Sub(since), " by ", origin), " by ")
		}
		require.Equal(t, want, is, at)
	case strings.HasPrefix(want, "twins"):
		is := "twins"
		for _, twin := range s.last.Twins {
			is += " " + strings.TrimSuffix(s.table.Rows[twin.Row].Name+"#"+s.table.Rows[twin.Row].ID, "#")
		}
		require.Equal(t, want, is, at)
	case strings.HasPrefix(want, "events"):
		is := "events"
		for _, e := range s.last.Events {
			is += strings.TrimSuffix(" "+e.Name, " ") + " " + e.Kind.String()
		}
		require.Equal(t, want, is, at)
	default:
		var is []string
		for _, name := range slices.Sorted(maps.Keys(s.last.Rules)) {
			r := s.last.Rules[name]
			line := name + " " + string(r.Content)
			if r.State == NeverValid {
				line = name
			}
			if r.State != InForce {
				line += " (" + r.State.String() + ")"
			}
			if strings.Contains(want, name+" "+string(r.Content)+" @") || strings.Contains(want, line+" @") {
				line += fmt.Sprintf(" @%d", given(r.Bucket)/made)
				if up := r.Bucket - given(r.Bucket); up > 0 {
					line += fmt.Sprintf("+%d", up)
				}
			}
			is = append(is, line)
		}
		if len(is) == 0 {
			is = []string{"nothing"}
		}
		require.Equal(t, want, strings.Join(is, ", "), at)
	}
}

// Events of all names come before those of one, in the order in which they were found.
func TestEventsAreInOrder(t *testing.T) {
	for range 100 {
		m, all := New[text](AfterLoads), &Table[text]{}
		for i := range 40 {
			all.Rows = append(all.Rows, Row[text]{Name: fmt.Sprint(i), Content: "5/s"})
		}
		m.Load(time.Unix(0, 0), all)
		m.Fail(time.Unix(1, 0))
		events := m.Load(time.Unix(2, 0), new(Table[text])).Events
		require.Equal(t, []Kind{SourceBack, LossHeld}, []Kind{events[0].Kind, events[1].Kind})
	}
}
