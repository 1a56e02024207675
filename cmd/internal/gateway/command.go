// Package gateway implements the command tokenbucket gateway, a reverse proxy. Together with all other instances on the same Redis, it makes
// no more calls than the limits allow. The limits are in a database table or in a file.
package gateway

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// ErrCutOff is returned if the gateway did not shut down cleanly: calls were cut off after --drain, or a server failed.
var ErrCutOff = errors.New("gateway: cut off")

const long = `A reverse proxy that makes no more calls than the limits in a table or a file allow.

A row of the table, or an item of the file, is a bucket: a path (--key), permits per second, and how many seconds a call may wait. All
gateways with the same Redis share the buckets. Rows may change while gateways run: each gateway reads them every --interval.
A call that gets no permit in time is answered with 429 and Retry-After. A 429 or 503 with Retry-After from an upstream
penalizes its bucket: the whole fleet sends no call of it until then.`

const examples = `  tokenbucket gateway --upstream http://localhost:9000 --limits sqlite://limits.db --redis localhost:6379 --create-table
  tokenbucket gateway --upstream http://localhost:9000 --limits file:///etc/tokenbucket/limits.yaml --redis localhost:6379
  TOKENBUCKET_LIMITS=mysql://user:password@db:3306/limits tokenbucket gateway --config gateway.yaml`

var settingsHelp = `Settings:
  Each flag may also be a key of the file that --config names, or an environment variable: interval: 2s is
  TOKENBUCKET_INTERVAL=2s is --interval 2s. Flags win over the environment, the environment over the file. A list is a list
  in the file, with commas in the environment. Put passwords into the file or the environment: every user of the machine
  can see flags. The gateway prints no passwords.

Admin:
  /healthz  200 while the process lives
  /readyz   200 if a call that may pass is served here: limits are loaded, and Redis can decide, or --fail or the switch lets calls
            pass without it; otherwise 503, as while draining and beyond --max-age
  /stats    limits in force, loads and calls, in JSON
  /metrics  the same for Prometheus; docs/operations.md lists what to alert on
  /console  every limit of the fleet, for people: docs/console.md

Signals:
  SIGHUP reads the settings and the limits again. These change at once: ` + strings.Join(live, ", ") + `.
  The others need a restart, and the log names those that have changed. If a setting is invalid, none changes.
  The first SIGTERM or Ctrl-C drains: no new connections, and calls in flight may end within --drain. The second one ends
  the process at once.

Exit status:
  0 clean shutdown, 1 calls were cut off, 2 could not start; 143 or 130 (128 and the signal) after a second SIGTERM or Ctrl-C
`

// Command returns the command tokenbucket gateway.
func Command() *cobra.Command {
	o := new(options)
	groups := o.flags()
	cmd := &cobra.Command{
		Use:     "gateway",
		Short:   "Run a reverse proxy with limits from a table or a file",
		Long:    long,
		Example: examples,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 { // not printed: an argument may be a DSN
				return fmt.Errorf("gateway: %d unexpected arguments: want flags only, each value after its flag", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.load(cmd.Flags(), os.Environ()); err != nil {
				return err
			}
			c, err := o.parse()
			if err != nil {
				return err
			}
			return c.run(cmd.Context(), cmd.ErrOrStderr())
		},
	}
	for _, g := range groups {
		cmd.Flags().AddFlagSet(g.flags)
	}
	complete(cmd)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return flagError(cmd.Flags(), err) })
	cmd.SetUsageFunc(func(cmd *cobra.Command) error { return usage(cmd.OutOrStderr(), cmd, groups) })
	return cmd
}

// complete registers shell completions for flags with few values.
func complete(cmd *cobra.Command) {
	for flag, values := range map[string][]string{
		"store": {"script", "lock", "memory"}, "fail": {"closed", "open", "share:"}, "log-format": {"text", "json"},
		"log-level": {"debug", "info", "warn", "error"}, "unknown": {"pass", "refuse"}, "bad-rows": {"refuse", "pass"},
		"switch": {"none", "sql", "redis:"}, "key": {"path", "client", "header:", "path+client", "path+header:"},
		"match":  matches,
		"limits": {"file://", "sqlite://", "mysql://", "postgres://"}, "redis": {"redis://", "rediss://", "unix://", "redis+cluster://", "redis+sentinel://"},
	} {
		must(cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace)))
	}
	must(cmd.MarkFlagFilename("config", "yaml", "yml"))
	must(cmd.MarkFlagFilename("console-users"))
}

// must panics on an error that only a mistake in this package can cause.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// group is a set of flags under one title of the help.
type group struct {
	title string
	flags *pflag.FlagSet
}

func usage(w io.Writer, cmd *cobra.Command, groups []group) error {
	var text strings.Builder
	fmt.Fprintf(&text, "Usage:\n  %s --upstream URL --limits DSN --redis ADDRESS [flags]\n\nExamples:\n%s\n", cmd.CommandPath(), cmd.Example)
	for _, g := range groups {
		fmt.Fprintf(&text, "\n%s:\n%s", g.title, g.flags.FlagUsagesWrapped(120))
	}
	_, err := io.WriteString(w, text.String()+"\n"+settingsHelp)
	return err
}
