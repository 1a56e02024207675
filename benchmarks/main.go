// Command benchmarks compares this library with its rivals, on its own redis-server:
//
//	go run ./benchmarks            everything: a few minutes, then a table; writes RESULTS.md and throughput.svg
//	go run ./benchmarks --quick    a small run that writes no files
//	go run ./benchmarks --draw     only throughput.svg, from the table in RESULTS.md
//
// Rivals take turns, each round begins with another rival, and medians are compared. So a machine that is slow for a while slows all rivals
// alike. Granted permits are audited during the measurement.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/machine"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/spf13/pflag"
)

// Exit statuses. A target that was missed is a result, not a failure.
const (
	exitOK     = 0
	exitBroken = 1 // a limiter granted too much, or its account is wrong
	exitUsage  = 2 // a flag is invalid, or a dependency of the program could not start
)

// measuredModules are the modules of the rivals and of their Redis clients.
var measuredModules = []string{
	"github.com/redis/go-redis/v9", "github.com/go-redis/redis_rate/v10", "github.com/throttled/throttled/v2",
	"github.com/ulule/limiter/v3", "github.com/sethvargo/go-redisstore", "github.com/gomodule/redigo",
	"golang.org/x/time", "go.uber.org/ratelimit",
}

var errBroken = errors.New("a check was violated")

func main() {
	if os.Getenv(childVariable) != "" {
		os.Exit(child(os.Stdin, os.Stdout, os.Stderr))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second Ctrl-C ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	s, err := parse(args, stderr)
	if errors.Is(err, pflag.ErrHelp) {
		return exitOK
	}
	switch {
	case err != nil:
	case s.draw:
		err = redraw(s.out, stdout)
	default:
		err = s.measure(ctx, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintf(stderr, "benchmarks: %v\n", err)
	}
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errBroken):
		return exitBroken
	default:
		return exitUsage
	}
}

// settings holds the flags.
type settings struct {
	args     []string
	rounds   int
	duration time.Duration
	only     string
	out      string
	quick    bool
	draw     bool
	buckets  int
	waiters  int

	wanted *regexp.Regexp
}

func parse(args []string, stderr io.Writer) (*settings, error) {
	s := &settings{args: args}
	f := pflag.NewFlagSet("benchmarks", pflag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&s.rounds, "rounds", 5, "rounds, in which the rivals take turns")
	f.DurationVar(&s.duration, "duration", 500*time.Millisecond, "how long each rival is measured in a round")
	f.StringVar(&s.only, "only", "", "only the workloads whose names match this regular expression; writes no files unless --out is given")
	f.StringVar(&s.out, "out", "benchmarks", "directory for RESULTS.md and throughput.svg, made if missing")
	f.BoolVar(&s.quick, "quick", false, "a small run: 2 rounds of 50ms, few buckets and waiters; writes no files unless --out is given")
	f.BoolVar(&s.draw, "draw", false, "measures nothing: only draws throughput.svg anew, from the table in RESULTS.md")
	f.IntVar(&s.buckets, "buckets", 1_000_000, "the most buckets at once, from 1000")
	f.IntVar(&s.waiters, "waiters", 100_000, "callers that wait at once, from 100")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if (s.quick || s.only != "") && !f.Changed("out") {
		s.out = ""
	}
	if s.quick {
		s.shrink(f)
	}
	return s, s.validate(f)
}

// shrink reduces the settings for --quick, except those given explicitly.
func (s *settings) shrink(f *pflag.FlagSet) {
	if !f.Changed("rounds") {
		s.rounds = 2
	}
	if !f.Changed("duration") {
		s.duration = 50 * time.Millisecond
	}
	if !f.Changed("buckets") {
		s.buckets = 10_000
	}
	if !f.Changed("waiters") {
		s.waiters = 5_000
	}
}

func (s *settings) validate(f *pflag.FlagSet) error {
	var err error
	s.wanted, err = regexp.Compile(s.only)
	switch {
	case err != nil:
		return flagError("only", s.only, "a regular expression")
	case f.NArg() > 0:
		return fmt.Errorf("argument %q: want none", f.Arg(0))
	case s.rounds < 1 || s.rounds > 1000:
		return flagError("rounds", s.rounds, "1 to 1000")
	case s.duration < time.Millisecond || s.duration > time.Minute:
		return flagError("duration", s.duration, "1ms to 1m")
	case s.out == "" && f.Changed("out"):
		return flagError("out", `""`, "a directory")
	case s.buckets < 1000 || s.buckets > 10_000_000:
		return flagError("buckets", s.buckets, "1000 to 10000000")
	case s.waiters < 100 || s.waiters > 1_000_000:
		return flagError("waiters", s.waiters, "100 to 1000000")
	}
	return nil
}

// flagError returns an error that names a flag, its value and what is accepted.
func flagError(flag string, value any, want string) error {
	return fmt.Errorf("--%s %v: want %s", flag, value, want)
}

// bench is a run of the program.
type bench struct {
	*settings
	ctx      context.Context
	server   *redistest.Server
	clients  *clients
	progress *progress
	opened   int // number of limiters so far, for unique names
	lines    []line
}

func (s *settings) measure(ctx context.Context, stdout, stderr io.Writer) error {
	server, err := redistest.StartMain()
	if err != nil {
		return err
	}
	defer server.Close()
	c, err := connect(server.Addr)
	if err != nil {
		return err
	}
	defer c.close()
	b := &bench{settings: s, ctx: ctx, server: server, clients: c, progress: &progress{out: stderr}}
	all, err := b.measureRows()
	if err != nil {
		return err
	}
	info, err := b.clients.plain.Info(ctx, "server").Result()
	if err != nil {
		return err
	}
	m := machine.Read(info, "go run ./benchmarks "+strings.Join(b.args, " "), measuredModules...)
	r := &results{outcomes: all, lines: b.lines, machine: m}
	r.print(stdout)
	if s.out != "" {
		if err := r.write(s.out, stdout); err != nil {
			return err
		}
	}
	return r.broken()
}

func (b *bench) measureRows() ([]outcome, error) {
	var todo []row
	for _, r := range rows() {
		if b.wanted.MatchString(r.name) {
			todo = append(todo, r)
		}
	}
	if len(todo) == 0 {
		return nil, flagError("only", b.only, "an expression that matches a workload")
	}
	var all []outcome
	for i, r := range todo {
		b.progress.begin("[%d/%d] %s", i+1, len(todo), r.name)
		o := outcome{row: r.name}
		if err := r.run(b, &o); err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		b.progress.end(&o)
		all = append(all, o)
	}
	return all, nil
}
