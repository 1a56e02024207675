package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

const consoleLong = `Serves web pages that show every limit of the fleet, the state of each gateway, waiting calls and recent changes. Gateways publish
these through the Redis that they share. With --limits it also shows rows that no gateway has published, and users allowed by
--console-users or --console-proxy can change rows: with a preview, a version check, a reason, an audit table, and undo.

By default it is read-only and serves only this machine. It accepts the file and the variables of tokenbucket gateway,
too, and ignores settings that it does not use.`

const consoleExamples = `  tokenbucket console --redis localhost:6379
  tokenbucket console --redis localhost:6379 --limits sqlite://limits.db --create-table --console-users users.txt
  tokenbucket console --config gateway.yaml --console-listen :8090 --console-host console.example.com --console-users users.txt`

// consoleFlags are the flags that the help shows. The gateway's other flags are accepted and ignored.
var consoleFlags = []string{
	"console-listen", "console-users", "console-host", "console-reader", "console-proxy", "trusted-proxy", "redis", "key-prefix", "store-timeout", "limits", "table",
	"columns", "quota", "jitter", "key", "shadow", "create-table", "interval", "load-timeout", "wait", "switch", "config", "log-format", "log-level",
}

// ConsoleCommand returns the command tokenbucket console.
func ConsoleCommand() *cobra.Command {
	o := new(options)
	var listen string
	cmd := &cobra.Command{
		Use: "console", Short: "Show every limit of a fleet, and change one", Long: consoleLong, Example: consoleExamples, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.load(cmd.Flags(), os.Environ()); err != nil {
				return err
			}
			c, err := o.parseForConsole(listen)
			if err != nil {
				return err
			}
			return c.runConsole(cmd.Context(), listen, cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&listen, "console-listen", "127.0.0.1:8090", "`address` to serve on")
	for _, g := range o.flags() {
		g.flags.VisitAll(func(flag *pflag.Flag) { flag.Hidden = !slices.Contains(consoleFlags, flag.Name) })
		f.AddFlagSet(g.flags)
	}
	complete(cmd)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return flagError(cmd.Flags(), err) })
	return cmd
}

// parseForConsole parses the settings that a console uses.
func (o *options) parseForConsole(listen string) (*config, error) {
	c := &config{options: *o}
	if !listenable(listen) {
		return nil, c.bad("console-listen", fmt.Sprintf("%q", listen), "host:port or :port")
	}
	if c.options.redis == "" {
		return nil, c.bad("redis", "missing", wantRedis+": the Redis that the gateways publish to")
	}
	if c.store == "memory" {
		return nil, c.bad("store", `"memory"`, "script or lock: gateways with --store memory publish nothing")
	}
	checks := []func() error{c.checkNumbers, c.checkWords, c.parseKeys, c.parseBuckets, c.parseConsole}
	if c.limits != "" {
		checks = append(checks, c.parseLimits)
	}
	for _, check := range checks {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// runConsole serves until ctx ends.
func (c *config) runConsole(ctx context.Context, listen string, logTo io.Writer) error {
	log := c.newLog(logTo, c.level)
	slog.SetDefault(log)
	s := &service{config: c, log: log, admin: &admin{config: c}}
	defer s.close()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return c.bad("console-listen", fmt.Sprintf("%q", listen), "an address that can be listened on: "+err.Error())
	}
	s.onClose(func() { _ = l.Close() })
	client := c.redis.open()
	s.onClose(func() { _ = client.Close() })
	limits, err := s.rowsForConsole(ctx, client)
	if err != nil {
		return err
	}
	made, err := c.consoleOf(client, limits, s.editor, s.admin.sw.Load(), nil, log)
	if err != nil {
		return err
	}
	s.onClose(made.Close)
	server := &http.Server{Handler: bodiesInTime(made), ReadHeaderTimeout: 10 * time.Second, WriteTimeout: answerTime, IdleTimeout: 2 * time.Minute, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	stop := context.AfterFunc(ctx, func() { made.Close(); _ = server.Close() })
	defer stop()
	log.Info("ready", "console", "http://"+l.Addr().String()+"/", "changes", strings.Join(c.mayChange(s, limits != nil), ", "))
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// mayChange returns what users can change on this console, for the log.
func (c *config) mayChange(s *service, limits bool) (all []string) {
	if len(c.access.Users)+len(c.access.Proxies) == 0 {
		return []string{"none: read-only"}
	}
	if s.editor != nil {
		all = append(all, "rows")
	}
	if limits {
		all = append(all, "penalties", "resets")
	}
	if s.admin.sw.Load() != nil && (c.switchAt != "sql" || s.editor != nil) {
		all = append(all, "switch")
	}
	if all == nil {
		return []string{"none: there are no --limits"}
	}
	return all
}

// rowsForConsole opens a registry of the rows; nil without --limits.
func (s *service) rowsForConsole(ctx context.Context, client redis.UniversalClient) (*registry.Registry, error) {
	c := s.config
	if c.limits == "" {
		return nil, nil
	}
	ctx, stop := context.WithTimeout(ctx, c.wait)
	defer stop()
	fail := func(err error) error { return fmt.Errorf("--limits %s: %w", hideDSN(c.limits), err) }
	source, db, err := s.openLimits(ctx)
	if err != nil {
		return nil, fail(err)
	}
	if s.editor, err = s.newEditor(db); err != nil {
		return nil, fail(err)
	}
	sw, err := s.newSwitch(client, db)
	if err != nil {
		return nil, fmt.Errorf("--switch %s: %w", c.options.switchAt, err)
	}
	if sw != nil {
		s.onClose(sw.Close)
		s.admin.sw.Store(sw)
	}
	opts := append(c.registryOptions(), registry.WithInterval(c.interval), registry.WithLoadTimeout(c.loadTimeout), registry.WithLogger(slog.New(slog.DiscardHandler)), registry.WithWait(ctx),
		registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(c.storeTimeout)))
	lossOptions, err := c.lossOptions(client)
	if err != nil {
		return nil, err
	}
	limits, err := registry.New(source, c.newStore(client), slices.Concat(opts, lossOptions, c.backends(client))...)
	if err != nil {
		return nil, fail(err)
	}
	s.onClose(limits.Close)
	return limits, nil
}
