package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/spf13/cobra"
)

const demoLong = `Starts an embedded Redis (or uses --redis), a stub upstream, and several gateways that share one bucket. Each
has a connection, a store and a limiter of its own, as if it ran on a machine of its own. Together they offer
about twelve times the rate. The upstream records when each call reaches it, and the verdict compares that with the bound:

  in any window of T seconds at most  max(burst, 1) + rate × T  calls   (with --warmup: 1 + rate × T)

With --priority the calls are bookings and searches, first with one priority for all, then with the lowest for searches: see
docs/priority.md.

With --console it runs until Ctrl-C, with more limits, and shows them in the console: see docs/console.md.

Exit status: 0 the bound was kept, 1 it was broken or calls failed, 2 the demo could not run.`

// limiterFunc creates the limiter of one gateway. It is options.limiter, except in a test, whose limiter grants too many calls.
type limiterFunc func(options, tokenbucket.Store, ...tokenbucket.Option) (*tokenbucket.RateLimiter, error)

func demoCommand(limit limiterFunc) *cobra.Command {
	d := demo{newLimiter: limit}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch several gateways keep to one rate",
		Long:  demoLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if d.priority && !cmd.Flags().Changed("rate") {
				d.rate = sharedRate
			}
			if !cmd.Flags().Changed("burst") {
				d.burst = max(1, d.rate)
			}
			if err := d.validate(cmd.Flags().Changed("burst")); err != nil {
				return err
			}
			d.out = cmd.OutOrStdout()
			if d.console {
				ctx := cmd.Context()
				if cmd.Flags().Changed("duration") {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, d.duration)
					defer cancel()
				}
				return d.showConsole(ctx)
			}
			if d.priority {
				return d.showPriority(cmd.Context())
			}
			return d.run(cmd.Context())
		},
	}
	d.addFlags(cmd.Flags())
	return cmd
}

// demo is one run of the demo. All its times are durations since origin, on the monotonic clock.
type demo struct {
	options
	newLimiter limiterFunc
	out        io.Writer
	origin     time.Time
}

func (d *demo) run(ctx context.Context) error {
	b, err := openBackend(ctx, &d.options)
	if err != nil {
		return err
	}
	defer b.close()
	d.origin = time.Now()
	up, err := startUpstream(d.origin)
	if err != nil {
		return err
	}
	defer up.close()
	fleet, err := d.startFleet(b, up)
	if err != nil {
		return err
	}
	defer fleet.close()

	d.introduce(b, up)
	ended := d.load(ctx, fleet, up)
	return d.report(fleet, up, ended)
}

// load offers calls until the duration is over or ctx ends, and then waits for the calls in flight. It returns the time at which it stopped
// offering calls.
func (d *demo) load(ctx context.Context, fleet *fleet, up *upstream) (ended time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d.duration)
	defer cancel()

	done := make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() { watch(d.out, d.duration, fleet.calls, up, done) })
	var gateways sync.WaitGroup
	for _, g := range fleet.gateways {
		gateways.Go(func() { g.offer(ctx, d.demand()/float64(d.instances)) })
	}
	<-ctx.Done()
	ended = min(time.Since(d.origin), d.duration)
	gateways.Wait()
	close(done)
	watcher.Wait()
	return ended
}

// demand returns the calls per second that all gateways together offer.
func (o *options) demand() float64 { return max(30, 12*o.rate) }

func (d *demo) introduce(b *backend, up *upstream) {
	fmt.Fprintf(d.out, "%s one bucket, %q: %s.\n%s\n",
		plural(d.instances, "gateway uses", "gateways share"), bucketName, d.describeBucket(), b.about)
	fmt.Fprintf(d.out, "%s. About %s calls/s are offered for %v; those that pass go to a stub upstream at\n%s\n\n",
		d.describeWait(), number(d.demand()), d.duration, up.url)
}

func (o *options) describeBucket() string {
	rate := number(o.rate)
	switch {
	case o.warmup > 0:
		return fmt.Sprintf("cold at the start, from %s to %s permits/s within %v of full demand",
			number(o.rate/coldFactor), rate, o.warmup)
	case o.burst == 0:
		return fmt.Sprintf("%s permits/s, none saved up", rate)
	default:
		return fmt.Sprintf("%s permits/s, at most %s saved up, full at the start", rate, number(o.burst))
	}
}

func (o *options) describeWait() string {
	if o.maxWait == 0 {
		return "No call waits for its permit"
	}
	return fmt.Sprintf("A call may wait %v for its permit", o.maxWait)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// conclude prints a summary of the run in plain words.
func (d *demo) conclude() {
	who := "one gateway took its permits from one bucket"
	if d.instances > 1 {
		who = fmt.Sprintf("%d gateways that know nothing of one another took their permits from one bucket", d.instances)
	}
	got := number(d.rate) + " calls/s"
	switch {
	case d.warmup > 0:
		got = "at most " + got + " and fewer while it was cold"
	case d.burst >= 1:
		got += " besides the " + number(d.burst) + " saved up"
	}
	what := "whose permit was due passed"
	if d.maxWait > 0 {
		what = fmt.Sprintf("whose permit fell due within %v waited for it", d.maxWait)
	}
	fmt.Fprintf(d.out, "What you saw: %s.\nSo the upstream got the rate of that bucket, %s, however many were asked for.\n", who, got)
	fmt.Fprintf(d.out, "A call %s; any other was refused at once, and took nothing.\n\n", what)
}
