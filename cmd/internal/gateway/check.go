package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// ErrFaulty: the check has found something that must be repaired. It was printed.
var ErrFaulty = errors.New("gateway: faulty")

const checkLong = `Tells whether a gateway with these settings would do what its table says. It changes nothing: no table is created, and the bucket
that is tried in Redis is one of its own, which expires. It takes the flags of tokenbucket gateway, its file and its variables.

Each line begins with ok, warn (it works, but perhaps not as meant) or FAIL. Exit status: 0, or 1 if there is a FAIL, 2 if the settings
cannot be read.`

// CheckCommand is the cobra command.
func CheckCommand() *cobra.Command {
	o := new(options)
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Tell what a gateway with these settings would do, row by row, and what is wrong",
		Long:  checkLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.load(cmd.Flags(), os.Environ()); err != nil {
				return err
			}
			c, err := o.parse()
			if err != nil {
				return err
			}
			return c.check(cmd.Context(), cmd.OutOrStdout())
		},
	}
	for _, g := range o.flags() {
		cmd.Flags().AddFlagSet(g.flags)
	}
	complete(cmd)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return flagError(cmd.Flags(), err) })
	return cmd
}

// checker prints what it finds.
type checker struct {
	*config
	to     io.Writer
	faulty bool
	bound  bool // there are rows with a window or a concurrency
}

func (k *checker) ok(format string, args ...any)   { fmt.Fprintf(k.to, "ok    "+format+"\n", args...) }
func (k *checker) warn(format string, args ...any) { fmt.Fprintf(k.to, "warn  "+format+"\n", args...) }
func (k *checker) fail(format string, args ...any) {
	k.faulty = true
	fmt.Fprintf(k.to, "FAIL  "+format+"\n", args...)
}

// result says what became of a step.
func (k *checker) result(what string, err error) bool {
	if err != nil {
		k.fail("%s: %v", what, err)
		return false
	}
	k.ok("%s", what)
	return true
}

func (c *config) check(ctx context.Context, to io.Writer) error {
	k := &checker{config: c, to: to}
	k.ok("settings")
	for _, name := range c.strangers {
		k.warn("variable %s is no setting%s", name, nearest(": did you mean ", name, c.variables))
	}
	slog.SetDefault(silent) // what is found is printed
	k.inTime(ctx, k.table)
	if c.redis != nil {
		k.inTime(ctx, k.buckets)
	}
	if k.faulty {
		return ErrFaulty
	}
	return nil
}

// silent is a logger of what is printed anyway.
var silent = slog.New(slog.DiscardHandler)

// patience is how long each step waits.
func (k *checker) patience() time.Duration { return min(k.config.wait, 10*time.Second) }

// inTime makes a step. Each has a time of its own: what hangs must not make the next one fail.
func (k *checker) inTime(ctx context.Context, step func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, k.patience())
	defer cancel()
	step(ctx)
}

// table tells what the rows would come to.
func (k *checker) table(ctx context.Context) {
	if k.config.file != nil {
		k.rows("file "+k.config.file.Path, k.config.file)
		return
	}
	from := "table " + k.config.table + " of " + hideDSN(k.config.limits)
	d := *k.database
	d.create = false
	db, err := d.connect(ctx, false)
	if err != nil {
		k.fail("%s: %v", from, err)
		return
	}
	defer func() { _ = db.Close() }()
	source, err := sqlsource.New(db, d.dialect, d.options...)
	if err != nil {
		k.fail("%s: %v", from, err)
		return
	}
	if whole, err := source.WholeRates(ctx); err == nil && whole {
		k.warn("%s: the column of the rate holds no fractions: 2.5 becomes 3, and 0.4 becomes 0; DECIMAL(16,6) does", from)
	}
	k.rows(from, hinting{source})
	if k.config.switchAt == "sql" {
		k.turned(sqlsource.NewSwitch(db, d.dialect))
	}
}

// rows tells what a source's rows would come to.
func (k *checker) rows(from string, source registry.Source) {
	opts := []registry.Option{registry.WithLogger(silent), registry.WithBadRows(k.badRows), registry.WithUnknown(k.unknown),
		registry.WithTimeout(k.patience()), registry.WithLocalWindows(), registry.WithLocalSemaphores()}
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), append(opts, k.registryOptions()...)...)
	if !k.result(from, err) {
		return
	}
	defer limits.Close()
	for _, l := range limits.Limits() {
		k.bound = k.bound || l.Window != 0 || l.Concurrent != 0
		k.row(limits, &l)
	}
	if k.shadow {
		k.warn("shadow: all calls are counted, and none is refused")
	}
	s := limits.Stats()
	for i := range s.Rejected {
		k.fail("%v; %s", &s.Rejected[i], s.Rejected[i].Consequence)
	}
	if s.Limits+s.Bad == 0 {
		k.warn("there are no limits: calls have what --unknown says, %s", k.options.unknown)
	}
}

// turned tells how the switch is.
func (k *checker) turned(sw *registry.PolledSwitch, err error) {
	if err == nil {
		defer sw.Close()
		err = sw.Err()
	}
	what := "switch " + k.options.switchAt
	switch {
	case err != nil:
		k.fail("%s: %v", what, err)
	case sw.Enabled():
		k.ok("%s: on", what)
	default:
		k.warn("%s: off%s: every call passes", what, after(", ", sw.Origin()))
	}
}

// mostSkew is by how much a server's clock may differ before it is told.
const mostSkew = 2 * time.Second

// buckets tells whether Redis does what a store needs.
func (k *checker) buckets(ctx context.Context) {
	client := k.redis.open()
	defer func() { _ = client.Close() }()
	if !k.result("redis answers", client.Ping(ctx).Err()) {
		return
	}
	asked := time.Now()
	if now, err := client.Time(ctx).Result(); err != nil {
		k.fail("redis: its clock: %v", err)
	} else if skew := now.Sub(asked).Round(time.Millisecond); skew.Abs() > mostSkew {
		k.warn("redis: its clock differs from this machine's by %v; its own counts", skew)
	} else {
		k.ok("redis: its clock")
	}
	k.eviction(ctx, client)
	if k.store != "memory" {
		k.result("redis: rights of --store "+k.store, k.tryBucket(ctx, client))
		if k.bound {
			k.result("redis: rights of rows with a window or a concurrency", k.tryBounds(ctx, client))
		}
	}
	if k.config.switchAt != "" && k.config.switchAt != "sql" {
		k.turned(registry.NewRedisSwitch(client, k.config.switchAt[len("redis:"):]))
	}
}

// eviction tells whether buckets may be thrown away.
func (k *checker) eviction(ctx context.Context, client redis.UniversalClient) {
	settings, err := client.ConfigGet(ctx, "maxmemory*").Result()
	policy := settings["maxmemory-policy"]
	switch {
	case err != nil:
		k.warn("redis: its eviction policy is not known: %v", err)
	case settings["maxmemory"] == "0" || policy == "noeviction":
		k.ok("redis: evicts nothing (maxmemory %s, %s)", settings["maxmemory"], policy)
	default:
		k.warn("redis: maxmemory-policy %s throws buckets away when memory is short: a bucket that is lost forgets its debt", policy)
	}
}

// tryBucket does with a bucket of its own what a gateway does.
func (k *checker) tryBucket(ctx context.Context, client redis.UniversalClient) error {
	own := *k.config
	own.keyPrefix += "check:"
	l, err := tokenbucket.NewSmoothBursty("check", 1000, tokenbucket.WithStore(own.newStore(client)), tokenbucket.WithStoreTimeout(5*time.Second))
	if err != nil {
		return err
	}
	if _, err = l.TryAcquire(ctx, 1, time.Second); err == nil {
		_, err = l.State(ctx)
	}
	return errors.Join(err, l.Close(ctx))
}
