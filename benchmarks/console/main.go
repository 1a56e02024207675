// Command console measures the cost of a console, with its own redis-server, wrk and gateways:
//
//	go run ./benchmarks/console                ten minutes; prints three tables
//	go run ./benchmarks/console --only page    one of them: page, viewers, cost
//	go run ./benchmarks/console --quick        a small run
//
// The first table shows the first page of a gateway with 10,000 limits, the second the cost of 1000 viewers. The third compares two equal gateways.
// Ten readers follow the console of one of them: five the page of all limits, five that of one limit. wrk calls both in turn. After half of
// the rounds the readers move to the other gateway, which cancels differences between the processes.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// options holds the flags.
type options struct {
	rounds, limits, readers, connections int
	length, change, watch                time.Duration
}

func main() {
	var o options
	quick := pflag.Bool("quick", false, "a small run")
	pflag.IntVar(&o.rounds, "rounds", 40, "rounds, each of a run with and a run without readers")
	pflag.IntVar(&o.limits, "limits", 100, "limits of the gateways under load")
	pflag.IntVar(&o.readers, "readers", 10, "readers of the console")
	pflag.IntVar(&o.connections, "connections", 64, "connections of wrk")
	pflag.DurationVar(&o.length, "length", 5*time.Second, "of a run")
	pflag.DurationVar(&o.change, "change", 65*time.Second, "until a console whose readers have left reads no more")
	pflag.DurationVar(&o.watch, "watch", 20*time.Second, "how long 1000 viewers are watched")
	only := pflag.String("only", "", "`table` to make: page, viewers or cost; all of them without")
	pflag.Parse()
	if *quick {
		o.rounds, o.length, o.change = 2, 2*time.Second, time.Second
		o.watch = 4 * time.Second
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &o, *only); err != nil {
		fmt.Fprintln(os.Stderr, "console:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options, only string) error {
	dir, err := os.MkdirTemp("", "console-cost")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program := filepath.Join(dir, "tokenbucket")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, "github.com/go-tokenbucket/tokenbucket/cmd/tokenbucket")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	server, err := redistest.StartMain()
	if err != nil {
		return err
	}
	defer server.Close()
	l := &lab{program: program, dir: dir, redis: server.Addr}
	defer l.close()
	if err := l.startUpstream(); err != nil {
		return err
	}
	for _, part := range []struct {
		name    string
		measure func() error
	}{
		{"page", func() error { return firstPage(ctx, l, 10_000) }},
		{"viewers", func() error { return viewers(ctx, l, o, 1000) }},
		{"cost", func() error { return cost(ctx, l, o) }},
	} {
		if only != "" && only != part.name {
			continue
		}
		if err := part.measure(); err != nil {
			return err
		}
	}
	return nil
}
