package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"time"
)

// childVariable, when set, makes this program one process of a fleet.
const childVariable = "TOKENBUCKET_BENCHMARK_CHILD"

const (
	fleetProcesses = 16
	fleetCallers   = 8
	fleetLongest   = 3 * time.Second
)

// assignment is the work of a child. It is sent as a line of the child's standard input.
type assignment struct {
	Addr  string
	Rival string
	Names []string
	Limit limit
	Load  load
}

// report is the child's reply, a line of its standard output.
type report struct {
	Warmup, Run counts
}

// child runs an assignment: it connects, reports that it is ready, waits for the next line, and begins.
func child(in io.Reader, out, stderr io.Writer) int {
	lines := bufio.NewReader(in)
	if err := work(lines, json.NewEncoder(out)); err != nil {
		fmt.Fprintf(stderr, "benchmarks: child: %v\n", err)
		return exitUsage
	}
	return exitOK
}

func work(in *bufio.Reader, out *json.Encoder) error {
	text, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	var a assignment
	if err := json.Unmarshal(text, &a); err != nil {
		return err
	}
	found := named(a.Rival)
	if len(found) != 1 {
		return fmt.Errorf("rival %q: want one of the list", a.Rival)
	}
	c, err := connect(a.Addr)
	if err != nil {
		return err
	}
	defer c.close()
	l, err := found[0].open(c, a.Names, a.Limit)
	if err != nil {
		return err
	}
	var r report
	warm := a.Load
	warm.Duration /= 10
	r.Warmup = drive(l, warm)
	if err := out.Encode("ready"); err != nil {
		return err
	}
	if _, err := in.ReadBytes('\n'); err != nil {
		return err
	}
	r.Run = drive(l, a.Load)
	return out.Encode(r)
}

// process is a running child.
type process struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *json.Decoder
	stderr bytes.Buffer
}

func startProcess(ctx context.Context, a *assignment) (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.CommandContext(ctx, program)}
	p.cmd.Env = append(os.Environ(), childVariable+"=1")
	p.cmd.Stderr = &p.stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = json.NewDecoder(out)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	return p, json.NewEncoder(p.in).Encode(a)
}

// read decodes the child's next line.
func (p *process) read(into any) error {
	if err := p.out.Decode(into); err != nil {
		_ = p.cmd.Wait()
		return fmt.Errorf("a process of the fleet ended early: %w; it said: %s", err, p.stderr.String())
	}
	return nil
}

// runFleet runs n processes that call one bucket at the same time.
func runFleet(ctx context.Context, a *assignment, n int) ([]report, error) {
	ctx, cancel := context.WithCancel(ctx)
	var all []*process
	defer func() { // ends the processes that are left after an error
		cancel()
		for _, p := range all {
			_ = p.cmd.Wait()
		}
	}()
	for range n {
		p, err := startProcess(ctx, a)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	for _, p := range all {
		var word string
		if err := p.read(&word); err != nil {
			return nil, err
		}
	}
	for _, p := range all {
		if _, err := io.WriteString(p.in, "go\n"); err != nil {
			return nil, err
		}
	}
	reports := make([]report, n)
	for i, p := range all {
		if err := p.read(&reports[i]); err != nil {
			return nil, err
		}
		if err := errors.Join(p.in.Close(), p.cmd.Wait()); err != nil {
			return nil, err
		}
	}
	return reports, nil
}

// shared is a rival's bucket that a fleet uses, with the results of the rounds.
type shared struct {
	*contender
	assignment assignment
	nanos, p99 []float64
	slowest    []float64 // throughput of the slowest process, as a share of the mean
}

// fleet measures rivals whose bucket several processes share.
func fleet(b *bench, o *outcome) error {
	o.base = redisRate
	processes := fleetProcesses
	if b.quick {
		processes = 4
		o.notes = append(o.notes, fmt.Sprintf("--quick: %d processes", processes))
	}
	var all []*shared
	for _, r := range named(lockStore, scriptStore, redisRate) {
		s, err := b.share(r)
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	var pings []float64
	for round := range b.rounds {
		p, err := b.pinged()
		if err != nil {
			return err
		}
		pings = append(pings, float64(p))
		for i := range all {
			if err := b.runShared(all[(i+round)%len(all)], processes); err != nil {
				return err
			}
		}
		b.progress.step("round %d of %d", round+1, b.rounds)
	}
	for _, s := range all {
		f := s.figure()
		f.nanos = median(s.nanos)
		f.allocs = math.NaN() // the allocations are in other processes
		o.figures = append(o.figures, f)
		o.violate(f.wrong)
	}
	o.fleetTargets(all, median(pings))
	return b.clients.plain.FlushDB(b.ctx).Err()
}

func (o *outcome) fleetTargets(all []*shared, ping float64) {
	o.notes = append(o.notes, fmt.Sprintf("PING of one caller on the idle machine: %s", micros(time.Duration(ping))))
	o.targets = append(o.targets, throughputAtLeast(scriptStore, 4, redisRate)(o.figures))
	for _, s := range all {
		switch s.name {
		case scriptStore:
			o.targets = append(o.targets, target{what: scriptStore + ": p99", value: median(s.p99) / ping, limit: 60, unit: "× PING"})
		case lockStore:
			o.targets = append(o.targets, throughputAtLeast(lockStore, 0.9, redisRate)(o.figures),
				target{what: lockStore + ": slowest process", value: median(s.slowest), limit: 0.8, atLeast: true, unit: "× the mean"})
		}
		o.notes = append(o.notes, fmt.Sprintf("%s: p99 %s, slowest process %s × the mean",
			s.name, micros(time.Duration(median(s.p99))), short(median(s.slowest))))
	}
}

// share opens a rival's bucket.
func (b *bench) share(r rival) (*shared, error) {
	ld := load{Callers: fleetCallers, Keys: 1, Duration: min(6*b.duration, fleetLongest), Latencies: true}
	c, err := b.enter(r, unlimited, ld, allGranted)
	if err != nil {
		return nil, err
	}
	names := bucketNames(fmt.Sprintf("b%02d:", b.opened), 1)
	return &shared{contender: c, assignment: assignment{b.server.Addr, r.name, names, unlimited, ld}}, nil
}

func (b *bench) runShared(s *shared, processes int) error {
	reports, err := runFleet(b.ctx, &s.assignment, processes)
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	var all, run counts
	var perSecond float64
	least := math.Inf(1)
	for i := range reports {
		r := &reports[i]
		all.add(&r.Warmup)
		all.add(&r.Run)
		run.add(&r.Run)
		run.Elapsed = max(run.Elapsed, r.Run.Elapsed)
		own := float64(r.Run.answered()) / r.Run.Elapsed.Seconds()
		perSecond += own
		least = min(least, own)
	}
	s.settle(all, allGranted)
	s.rounds = append(s.rounds, run)
	s.nanos = append(s.nanos, 1e9/perSecond)
	s.p99 = append(s.p99, float64(run.Latencies.quantile(0.99)))
	s.slowest = append(s.slowest, least*float64(processes)/perSecond)
	return nil
}
