package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// watch shows the demo's progress until done is closed: a bar on a terminal, otherwise a line a second. It writes no escape codes.
func watch(out io.Writer, duration time.Duration, t *tally, up *upstream, done <-chan struct{}) {
	every, show := time.Second, printLine
	if isTerminal(out) {
		every, show = 200*time.Millisecond, drawBar
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			show(out, duration, t, up)
		case <-done:
			if isTerminal(out) {
				drawBar(out, duration, t, up)
				fmt.Fprintln(out)
			}
			fmt.Fprintln(out)
			return
		}
	}
}

func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func printLine(out io.Writer, duration time.Duration, t *tally, up *upstream) {
	fmt.Fprintf(out, "%3.0f s   %s\n", elapsed(duration, t).Seconds(), counts(t, up))
}

func drawBar(out io.Writer, duration time.Duration, t *tally, up *upstream) {
	const width = 20
	at := elapsed(duration, t)
	full := int(width * at / duration)
	bar := strings.Repeat("█", full) + strings.Repeat("░", width-full)
	fmt.Fprintf(out, "\r%s %4.1f s   %s", bar, at.Seconds(), counts(t, up))
}

func elapsed(duration time.Duration, t *tally) time.Duration {
	return min(time.Since(t.origin), duration)
}

// counts formats the counts so far. They only grow, so a line is never shorter than the one that it overwrites.
func counts(t *tally, up *upstream) string {
	offered, by := t.sofar()
	s := fmt.Sprintf("offered %d   passed %d   refused %d   seen by upstream %d", offered, by[passed], by[refused], up.seen())
	if by[failed] > 0 {
		s += fmt.Sprintf("   errors %d", by[failed])
	}
	return s
}
