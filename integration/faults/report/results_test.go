package main

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// logged is a testing.TB that keeps its log, as lines of go test -json.
type logged struct {
	testing.TB
	test  string
	lines strings.Builder
}

func (l *logged) Helper() {}

func (l *logged) Logf(format string, args ...any) {
	l.event("output", "    some_test.go:1: "+fmt.Sprintf(format, args...)+"\n")
}

func (l *logged) event(action, output string) {
	fmt.Fprintf(&l.lines, "{\"Action\":%q,\"Package\":\"p\",\"Test\":%q,\"Output\":%q}\n", action, l.test, output)
}

// Figures of a row's tests and their subtests are one range each, by faultlab's own form.
func TestTable(t *testing.T) {
	l := &logged{test: "TestC1HolderPausedPastTTL/lock"}
	faultlab.Figure(l, "served after, of 1.05s", 1300*time.Millisecond)
	faultlab.Figure(l, "permits lost", 3)
	l.Logf("anything else = 7")
	l.test = "TestC1Again"
	faultlab.Figure(l, "served after, of 1.05s", 90*time.Microsecond)
	faultlab.Figure(l, "share = part, %", 99.5)
	faultlab.Figure(l, "permits over", -8.731e-9)
	faultlab.Figure(l, "permits over", 0.0)
	l.event("pass", "")
	l.test = "TestC1HolderPausedPastTTL/lock"
	l.event("pass", "")
	l.test = "TestC1HolderPausedPastTTL"
	l.event("pass", "")
	l.test = "TestSoak"
	l.event("fail", "")
	l.test = "TestOther"
	l.event("pass", "")
	l.test = "TestA1Baseline"
	l.event("skip", "")
	l.test = ""
	l.event("fail", "")

	r := newResults()
	require.NoError(t, r.read(strings.NewReader(l.lines.String()), io.Discard))
	var b strings.Builder
	r.write(&b, header{Command: "x", Commit: "abc", Seed: "7"})
	text := b.String()
	require.Contains(t, text, "| C1 | a lock's holder is stopped beyond its time to live | 2 passed | "+
		"served after, of 1.05s: 90µs to 1.3s; permits lost: 3; share = part, %: 99.5; permits over: 0 |\n")
	require.Contains(t, text, "| K1 | all of it at random | 0 passed, **1 failed** |  |\n")
	require.Contains(t, text, "| A1 | none: four processes, both stores, at full demand | 0 passed, **1 skipped** |  |\n")
	require.Contains(t, text, "- Commit: abc\n")
	require.Contains(t, text, "- Seed: 7\n")
	require.Contains(t, text, "without figures: TestOther.\n")
	require.Contains(t, text, "**Not passed:** TestSoak: fail, TestA1Baseline: skip, p: fail.\n")
	require.NotContains(t, text, "| C2 |")
}

// What cannot be read is an error, not a table that lacks it.
func TestBadLines(t *testing.T) {
	for name, text := range map[string]string{
		"not JSON":        "ok p 1s\n",
		"no value":        `{"Action":"output","Test":"TestC1X","Output":"a_test.go:1: figure: alone\n"}`,
		"no number":       `{"Action":"output","Test":"TestC1X","Output":"a_test.go:1: figure: what = much\n"}`,
		"number and time": `{"Action":"output","Test":"TestC1X","Output":"figure: a = 1\n"}{"Action":"output","Test":"TestC1X","Output":"figure: a = 1s\n"}`,
	} {
		require.Error(t, newResults().read(strings.NewReader(text), io.Discard), name)
	}
}
