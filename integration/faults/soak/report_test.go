//go:build linux

package soak

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// text is the result in Markdown.
func (r *result) text(t *testing.T, s *soak) string {
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	verdict := "all held"
	if t.Failed() {
		verdict = "**FAILED**, see the test's output"
	}
	p("# Soak: %v, a fault every %v", r.total, every)
	p("\nVerdict: %s.\n", verdict)
	p("- Command: `%s`", command(r.total))
	p("- Seed: `TOKENBUCKET_SEED=%s`", s.seed)
	p("- Date: %s", s.began.UTC().Format(time.DateTime+" MST"))
	p("- Machine: %s, %d processors, Linux %s; %s, redis-server %s; race detector %s", machine(), runtime.NumCPU(),
		kernel(), runtime.Version(), s.version(), map[bool]string{true: "on", false: "off"}[redistest.Raced])
	p("- Bucket: %v permits a second, burst %v; three processes of %d callers who wait for at most %v, and one with little time; stores script and lock", rate, burst, callers, patience)
	p("- Beside it: a semaphore of %d permits and %d holders, an exact window of %d in %v and %d callers\n", slots, holders, limit, window, visitors)
	p("## What held\n")
	p("| what | bound | seen |")
	p("| --- | --- | --- |")
	p("| permits used | | %d |", r.permits)
	worst := slices.MaxFunc(r.segments, func(a, b account) int { return int((a.level - b.level) * 1e6) })
	p("| fullest window of any stretch without a loss, by when permits were due: above rate × T | %v | %.2f (%s, %d permits) |", worst.most, worst.level, worst.what, worst.permits)
	byUse := slices.MaxFunc(r.segments, func(a, b account) int { return int((a.worst - b.worst) * 1e6) })
	p("| the same by when they were used | %v + rate × %v | %.2f (%s) |", byUse.most, byUse.late.Round(time.Millisecond), byUse.worst, byUse.what)
	if len(r.across) > 0 {
		across := slices.MaxFunc(r.across, func(a, b account) int { return int((a.level - a.most - b.level + b.most) * 1e6) })
		p("| fullest window across one loss | %v | %.2f (%s) |", across.most, across.level, across.what)
	}
	p("| fullest window of all | %v | %.2f |", r.whole.most, r.whole.level)
	p("| rate in %v without a fault (%d times) | at least 90 %% | %.1f %%; below it for itself in %d of them |", r.calm.Round(time.Millisecond), r.calmWindows, 100*r.used/r.due, r.tooLittle)
	for _, group := range slices.Sorted(maps.Keys(r.slowest)) {
		bound, late := map[string]time.Duration{"reserve": storeTimeout + patience, "hasty": hurry}[group], long
		if group == "hasty" {
			late = slack
		}
		if bound == 0 {
			bound = storeTimeout
		}
		p("| slowest answer, %s | %v + %v + 3 × its process' lateness | %v |", group, bound, late, r.slowest[group].Round(time.Millisecond))
	}
	p("| overtaken in their process | 0 | %d, of %d (not counted: %d who asked again, %d who got what their process owned) |", r.overtaken, r.turns, r.again, r.owned)
	p("| permits of the semaphore held at once | %d | %d, %d times held |", slots, r.crowd, r.held)
	p("| passed the window in any second | %d | %d, of %d |", limit, r.fullest, r.passed)
	for _, m := range r.memory {
		p("| memory, in the median of the first and the last tenth of the second half | + %.0f %% | %s |", 100*(m.most-1), m.text)
	}
	p("| locks, keys without a time to live, goroutines left | 0 | checked after the run |")
	p("\nSleepers were woken up to %v late, those of stopped processes included. Failures that callers were told: %s.\n", r.late.Round(time.Millisecond), counts(r.failures))
	p("## Faults\n")
	p("| fault | times | bites | calls meanwhile |")
	p("| --- | --- | --- | --- |")
	for _, k := range kinds {
		times, bites, calls := 0, 0, 0
		for _, h := range s.happened {
			if h.name == k.name {
				times, bites, calls = times+1, bites+h.bit, calls+h.calls
			}
		}
		p("| %s | %d | %d | %d |", k.name, times, bites, calls)
	}
	p("\n## Stretches between losses\n")
	p("| stretch | lasts | permits | fullest window when due, of %v | when used | at most late |", burst)
	p("| --- | --- | --- | --- | --- | --- |")
	for _, a := range r.segments {
		p("| %s | %v | %d | %.2f | %.2f | %v |", a.what, a.lasting.Round(time.Second/10), a.permits, a.level, a.worst, a.late.Round(time.Millisecond))
	}
	return b.String()
}

func command(total time.Duration) string {
	race := ""
	if redistest.Raced {
		race = "-race "
	}
	return fmt.Sprintf("go test %s-run Soak ./integration/faults/soak -soak %v -timeout %v -soak.report \"$PWD/docs/soak.md\"", race, total, total+15*time.Minute)
}

func read(file string) string {
	text, _ := os.ReadFile(file)
	return string(text)
}

// kernel is its version, as far as it is not this machine's own: major.minor.
func kernel() string {
	parts := strings.SplitN(read("/proc/sys/kernel/osrelease"), ".", 3)
	return strings.TrimSpace(strings.Join(parts[:min(2, len(parts))], "."))
}

// machine is the name of the processor.
func machine() string {
	_, rest, _ := strings.Cut(read("/proc/cpuinfo"), "model name")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(strings.TrimLeft(line, "\t :"))
}

// version of the server.
func (s *soak) version() string {
	info, _ := s.control.Info(background, "server").Result()
	_, rest, _ := strings.Cut(info, "redis_version:")
	line, _, _ := strings.Cut(rest, "\r")
	return line
}
