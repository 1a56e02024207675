package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// rows are the faults, by the prefixes of their tests' names.
var rows = []struct{ name, fault string }{
	{"A1", "none: four processes, both stores, at full demand"},
	{"A3", "none: ten million permits, simulated"},
	{"B1", "a reply is lost"},
	{"B2", "a connection is cut, before or after execution"},
	{"B3", "a cluster's master hangs"},
	{"B4", "Redis hangs, thousands of callers"},
	{"B5", "requests arrive twice, or late"},
	{"C1", "a lock's holder is stopped beyond its time to live"},
	{"C2", "a lock's holder is killed"},
	{"C3", "a lock is taken, and its answer lost"},
	{"C4", "a context ends while the lock is held"},
	{"C5", "releases are sent again"},
	{"C6", "lock and script stores on one bucket"},
	{"C7", "200 contend for one lock"},
	{"D1", "Redis is killed and restarts empty, 20 times"},
	{"D2", "FLUSHALL, DEL, eviction"},
	{"D3", "SCRIPT FLUSH"},
	{"D4", "failover to a replica that had fallen behind"},
	{"D5", "sentinel fails over, the master killed"},
	{"D6", "sentinel fails over, the master stopped, later back"},
	{"D7", "a cluster fails over"},
	{"D8", "a cluster's slots move under load"},
	{"D9", "CLUSTERDOWN"},
	{"D10", "a large slot moves, stage by stage"},
	{"E1", "the server's clock leaps an hour forwards"},
	{"E2", "the server's clock leaps back"},
	{"E3", "the server's clock goes to and fro by 2 s"},
	{"E4", "gateways' clocks are wrong and leap"},
	{"E5", "failover to a replica with another clock"},
	{"F1", "out of memory"},
	{"F2", "READONLY"},
	{"F3", "LOADING"},
	{"F4", "MISCONF"},
	{"F5", "NOREPLICAS"},
	{"F6", "MASTERDOWN"},
	{"F7", "NOAUTH, WRONGPASS, NOPERM"},
	{"F8", "BUSY, UNKILLABLE"},
	{"F9", "maxclients"},
	{"G1", "a slow or narrow network"},
	{"G2", "Redis or the network stalls"},
	{"G3", "the network comes and goes"},
	{"G4", "a partition"},
	{"G5", "a pool of two connections, 10,000 callers"},
	{"G6", "10,000 and 100,000 wait, 30 % cancel"},
	{"G7", "a process with 500 waiters is stopped for 3 s"},
	{"G8", "a starved processor"},
	{"G9", "cancels at any instant"},
	{"H1", "refusals without asking"},
	{"H2", "processes with leases die or stop"},
	{"H3", "the rate is lowered under leases"},
	{"H4", "requests share batches, against one by one"},
	{"I1", "numbers of every kind"},
	{"I2", "corrupt states"},
	{"I3", "hostile names and requests"},
	{"I4", "older and later formats"},
	{"J1", "semaphore: the server's clock leaps"},
	{"J3", "sliding window: the server's clock leaps"},
	{"K1", "all of it at random"},
	{"K2", "failure policies, by kind of fault"},
}

// others are the rows of tests whose names have none of these prefixes.
var others = map[string]string{"TestSoak": "K1", "TestPolicies": "K2", "TestAskedAgain": "F2"}

var byName = regexp.MustCompile(`^Test([A-K][1-9])`)

// rowOf returns the row of a test, "" if it has none.
func rowOf(test string) string {
	if m := byName.FindStringSubmatch(test); m != nil {
		return m[1]
	}
	return others[test]
}

// header describes the run above the table.
type header struct {
	Command, Commit, When, Machine, Seed string
	Took                                 time.Duration
}

// results are the results of the tests.
type results struct {
	rows  map[string]*row
	plain []string // tests without a row, in their order
	bad   []string // tests and packages that failed or were skipped, with the word
}

type row struct {
	passed, failed, skipped int // tests, not their subtests
	figures                 []*figure
}

// figure has all values of one name in a row.
type figure struct {
	name        string
	least, most value
	times       int
}

// value is a number, or a duration.
type value struct {
	number   float64
	duration bool
}

func (v value) String() string {
	if v.duration {
		return time.Duration(v.number).Round(10 * time.Microsecond).String()
	}
	return strconv.FormatFloat(v.number, 'f', -1, 64)
}

func newResults() *results { return &results{rows: map[string]*row{}} }

// read reads the output of go test -json. It prints the progress, the output of failed tests, and the output that belongs to no test.
func (r *results) read(from io.Reader, progress io.Writer) error {
	printed := map[string]string{} // by package and test
	for events := json.NewDecoder(from); ; {
		var e struct{ Action, Package, Test, Output string }
		if err := events.Decode(&e); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("go test -json: %w", err)
		}
		of := e.Package + "." + e.Test
		top, _, isSub := strings.Cut(e.Test, "/")
		switch e.Action {
		case "output":
			printed[of] += e.Output
			if err := r.line(top, e.Output); err != nil {
				return err
			}
		case "pass", "fail", "skip":
			if e.Action == "fail" {
				_, _ = io.WriteString(progress, printed[of])
			}
			delete(printed, of)
			if e.Test == "" {
				_, _ = fmt.Fprintln(progress, e.Action, e.Package)
			}
			if !isSub {
				r.ended(e.Package, top, e.Action)
			}
		}
	}
}

// ended counts a test. A package is one without a name, and counts if it fails.
func (r *results) ended(pkg, test, action string) {
	if test == "" {
		if action == "fail" {
			r.bad = append(r.bad, pkg+": fail")
		}
		return
	}
	if action != "pass" {
		r.bad = append(r.bad, test+": "+action)
	}
	name := rowOf(test)
	if name == "" {
		r.plain = append(r.plain, test)
		return
	}
	counts := map[string]*int{"pass": &r.row(name).passed, "fail": &r.row(name).failed, "skip": &r.row(name).skipped}
	*counts[action]++
}

func (r *results) row(name string) *row {
	if r.rows[name] == nil {
		r.rows[name] = new(row)
	}
	return r.rows[name]
}

// mark is faultlab's.
const mark = "figure: "

// line takes the figure that a line of a test's output may hold.
func (r *results) line(test, text string) error {
	_, text, found := strings.Cut(strings.TrimSpace(text), mark)
	name := rowOf(test)
	if !found || name == "" {
		return nil
	}
	i := strings.LastIndex(text, " = ")
	if i < 0 {
		return fmt.Errorf("%s: a figure without a value: %q", test, text)
	}
	what := text[:i]
	v, err := parse(text[i+len(" = "):])
	if err != nil {
		return fmt.Errorf("%s: %w", test, err)
	}
	row := r.row(name)
	at := slices.IndexFunc(row.figures, func(f *figure) bool { return f.name == what })
	if at < 0 {
		row.figures = append(row.figures, &figure{name: what, least: v, most: v, times: 1})
		return nil
	}
	f := row.figures[at]
	f.times++
	if v.duration != f.most.duration {
		return fmt.Errorf("%s: %q is %v here and %v there", test, what, v, f.most)
	}
	if v.number < f.least.number {
		f.least = v
	}
	if v.number > f.most.number {
		f.most = v
	}
	return nil
}

func parse(text string) (value, error) {
	if n, err := strconv.ParseFloat(text, 64); err == nil {
		if math.Abs(n) < 1e-6 { // the rest of floating-point sums
			n = 0
		}
		return value{number: n}, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return value{}, fmt.Errorf("neither a number nor a duration: %q", text)
	}
	return value{float64(d), true}, nil
}

// text returns a figure as the table shows it.
func (f *figure) text() string {
	if f.least == f.most {
		return fmt.Sprintf("%s: %v", f.name, f.most)
	}
	return fmt.Sprintf("%s: %v to %v", f.name, f.least, f.most)
}

// write writes the table. Rows that were not run are left out.
func (r *results) write(w io.Writer, h header) {
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	p("# Faults: what the tests measured\n")
	p("What is guaranteed in each row is in [consistency.md](consistency.md). Figures are the least and the most of all variants of a")
	p("test: both stores, kinds of clients, repetitions. What is allowed is in their names, if it is a number; what the machine is late")
	p("comes on top of times.\n")
	p("- Command: `%s`, %v", h.Command, h.Took)
	p("- Commit: %s", h.Commit)
	p("- Date: %s", h.When)
	p("- Machine: %s", h.Machine)
	p("- Seed: %s\n", h.Seed)
	p("| row | fault | tests | measured |")
	p("| --- | --- | --- | --- |")
	for _, known := range rows {
		row := r.rows[known.name]
		if row == nil {
			continue
		}
		var texts []string
		for _, f := range row.figures {
			texts = append(texts, strings.ReplaceAll(f.text(), "|", `\|`))
		}
		p("| %s | %s | %s | %s |", known.name, known.fault, row.tests(), strings.Join(texts, "; "))
	}
	for _, name := range slices.Sorted(maps.Keys(r.rows)) {
		if !slices.ContainsFunc(rows, func(known struct{ name, fault string }) bool { return known.name == name }) {
			p("| %s | | %s | |", name, r.rows[name].tests())
		}
	}
	if len(r.plain) > 0 {
		p("\nBesides, without figures: %s.", strings.Join(r.plain, ", "))
	}
	if len(r.bad) > 0 {
		p("\n**Not passed:** %s.", strings.Join(r.bad, ", "))
	}
}

// tests returns how many tests passed, and how many did not.
func (r *row) tests() string {
	text := fmt.Sprintf("%d passed", r.passed)
	if r.failed > 0 {
		text += fmt.Sprintf(", **%d failed**", r.failed)
	}
	if r.skipped > 0 {
		text += fmt.Sprintf(", **%d skipped**", r.skipped)
	}
	return text
}
