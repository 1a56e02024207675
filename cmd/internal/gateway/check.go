package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/cmd/internal/condition"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// ErrFaulty is returned if the check has found, and printed, a fault that must be repaired.
var ErrFaulty = errors.New("gateway: faulty")

const checkLong = `Checks whether a gateway with these settings would do what its table says. It changes nothing: it creates no table, and in Redis
it tries a bucket of its own, which expires. It takes the flags, the file and the variables of tokenbucket gateway.

Each line begins with ok, warn (works, but perhaps not as intended) or FAIL. Exit status: 0 without a FAIL, 1 with one, 2 if the settings
are invalid.`

// CheckCommand returns the command tokenbucket check.
func CheckCommand() *cobra.Command {
	o := new(options)
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Show what a gateway with these settings would do, row by row, and report faults",
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

// checker runs the checks and prints a line for each.
type checker struct {
	*config
	to     io.Writer
	faulty bool
	bound  bool // at least one row has a window or a concurrency
	off    bool // the switch lets every call pass
}

func (k *checker) ok(format string, args ...any)   { k.line("ok    "+format, args...) }
func (k *checker) warn(format string, args ...any) { k.line("warn  "+format, args...) }
func (k *checker) fail(format string, args ...any) {
	k.faulty = true
	k.line("FAIL  "+format, args...)
}

// line prints a line. Control characters in names and errors are escaped.
func (k *checker) line(format string, args ...any) {
	fmt.Fprintln(k.to, figure.Line(fmt.Sprintf(format, args...)))
}

// result prints the result of a step and reports whether it succeeded.
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
	for _, name := range c.unknownVariables {
		k.warn("variable %s is not a setting and is ignored%s", name, nearest(": did you mean ", name, c.variables))
	}
	slog.SetDefault(silent) // findings are printed instead
	k.inTime(ctx, k.table)
	if c.redis != nil {
		k.inTime(ctx, k.buckets)
	}
	if k.faulty {
		return ErrFaulty
	}
	return nil
}

// silent discards logs whose content is printed anyway.
var silent = slog.New(slog.DiscardHandler)

// patience returns the time limit of each step.
func (k *checker) patience() time.Duration { return min(k.config.wait, 10*time.Second) }

// inTime runs a step with a time limit of its own, so that a step that hangs does not make the next one fail.
func (k *checker) inTime(ctx context.Context, step func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, k.patience())
	defer cancel()
	step(ctx)
}

// table checks the source of the limits and prints the limit of each row.
func (k *checker) table(ctx context.Context) {
	if k.config.file != nil {
		k.rows("file "+k.config.file.Path, k.config.file)
		return
	}
	from := "table " + k.config.table + " of " + hideDSN(k.config.limits)
	d := *k.database
	d.create = false
	db, err := d.connect(ctx, false)
	if err != nil && k.createTable && errors.Is(err, fs.ErrNotExist) {
		k.warn("%s: the file does not exist yet: a gateway creates it (--create-table)", from)
		return
	}
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
		k.warn("%s: the rate column stores whole numbers only: 2.5 becomes 3, and 0.4 becomes 0; use DECIMAL(16,6)", from)
	}
	if _, err := source.Load(ctx); k.createTable && missingTable(err) {
		k.warn("%s: the table does not exist yet: a gateway creates it (--create-table)", from)
	} else {
		k.rows(from, hinting{source})
	}
	if k.config.switchAt == "sql" {
		k.turned(sqlsource.NewSwitch(db, d.dialect))
	}
}

// rows prints the limit of each row of a source.
func (k *checker) rows(from string, source registry.Source) {
	opts := []registry.Option{registry.WithLogger(silent), registry.WithBadRows(k.badRows), registry.WithUnknown(k.unknown),
		registry.WithLoadTimeout(k.patience()), registry.WithLocalWindows(), registry.WithLocalSemaphores()}
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), append(opts, k.registryOptions()...)...)
	if err != nil {
		k.fail("%s: limits cannot be loaded: %v", from, err)
		return
	}
	k.ok("%s", from)
	defer limits.Close()
	for _, l := range limits.Limits() {
		k.bound = k.bound || l.Window != 0 || l.Concurrent != 0
		k.row(limits, &l)
	}
	if k.shadow {
		k.warn("shadow: all calls are counted, none is refused")
	}
	s := limits.Stats()
	for i := range s.Rejected {
		k.fail("%v; %s", &s.Rejected[i], s.Rejected[i].Consequence)
	}
	c := k.ofRows(&s)
	k.condition(&c, c.State == condition.Bad)
}

// turned prints the state of the switch.
func (k *checker) turned(sw *killswitch.Switch, err error) {
	if err == nil {
		defer sw.Close()
		err = sw.Err()
	}
	if k.createTable && missingTable(err) {
		k.warn("switch %s: the table does not exist yet: a gateway creates it (--create-table)", k.options.switchAt)
		return
	}
	c := condition.OfSwitch(sw == nil || sw.Enabled(), err)
	if k.off = c.State == condition.Off; k.off {
		c.Why = sw.Origin()
	}
	k.condition(&c, c.State == condition.Unknown)
}

// condition prints the state of a part.
func (k *checker) condition(c *condition.Condition, faulty bool) {
	report := k.warn
	switch {
	case faulty:
		report = k.fail
	case c.State == condition.OK:
		report = k.ok
	}
	report("%s", c.Line(time.Now()))
}

// mostSkew is the clock offset of a server up to which no warning is printed.
const mostSkew = 2 * time.Second

// buckets checks that Redis supports what the store, the windows and the switch need.
func (k *checker) buckets(ctx context.Context) {
	k.redis.dialOnce()
	client := k.redis.open()
	defer func() { _ = client.Close() }()
	if k.config.switchAt != "" && k.config.switchAt != "sql" {
		k.turned(killswitch.NewRedis(client, k.config.switchAt[len("redis:"):]))
	}
	if !k.serves(ctx, client) {
		return
	}
	k.losses(ctx, client)
	asked := time.Now()
	if now, err := client.Time(ctx).Result(); err != nil {
		k.fail("redis: its clock: %v", err)
	} else if skew := now.Sub(asked).Round(time.Millisecond); skew.Abs() > mostSkew {
		k.warn("redis: its clock differs from this machine's by %v; limits use the clock of Redis", skew)
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
}

// serves prints the state of Redis, and reports whether it can be used.
func (k *checker) serves(ctx context.Context, client redis.UniversalClient) bool {
	unneeded := ""
	switch {
	case k.store == "memory":
		unneeded = "with --store memory"
	case k.off:
		unneeded = "while the switch is off"
	}
	p := newPulse(k.probed())
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go p.run(ctx, client)
	err := p.waitFirst(ctx, 3*k.storeTimeout) // with the handshake
	began := time.Now()
	if err == nil {
		err = p.probe(ctx, client)
	}
	c := condition.OfRedis(err, time.Since(began), k.storeTimeout, k.policy, unneeded)
	k.condition(&c, err != nil)
	return err == nil
}

// losses warns of the losses that running gateways report. A user without the right to read what they publish gets no warning.
func (k *checker) losses(ctx context.Context, client redis.UniversalClient) {
	if !k.published() {
		return
	}
	lost, _ := losses(ctx, fleet.NewReader(client, fleet.WithKeyPrefix(k.keyPrefix)))
	for _, i := range lost {
		c := condition.OfRows(condition.Table{Limits: i.Loads.Limits, Gone: i.Loads.Gone, Before: i.Loads.Before, Held: i.Loads.Held > 0, Lost: i.Loads.Lost})
		k.warn("instance %s:%d: %s", i.Host, i.PID, c.Line(time.Now()))
	}
}

// eviction checks whether Redis may evict buckets.
func (k *checker) eviction(ctx context.Context, client redis.UniversalClient) {
	memory, err := client.InfoMap(ctx, "memory").Result()
	most, policy := memory["Memory"]["maxmemory"], memory["Memory"]["maxmemory_policy"]
	switch {
	case err != nil:
		k.warn("redis: its eviction policy cannot be read, which needs +info: %v", err)
	case most == "0" || policy == "noeviction":
		k.ok("redis: evicts nothing (maxmemory %s, %s)", most, policy)
	default:
		k.warn("redis: maxmemory-policy %s evicts buckets when memory is short: an evicted bucket loses its debt", policy)
	}
}

// tryBucket runs a gateway's operations on a bucket of its own, to check the rights in Redis.
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
