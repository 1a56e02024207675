// Package gateway is the command tokenbucket gateway: a reverse proxy that makes no more calls than the limits in a table
// of a database, or in a file, allow, together with all other instances that share its Redis.
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

// ErrCutOff: the gateway ended, but not in order: requests were cut off when the time to drain was over, or a server failed.
var ErrCutOff = errors.New("gateway: cut off")

const long = `A reverse proxy that makes no more calls than the limits in a table or a file allow.

A row of the table, or an item of the file, is a bucket: a path (--key), permits per second, and the share of a second that a call may wait. All
gateways with the same Redis share the buckets. It may be changed while they run: each looks every --interval.
A call that gets no permit in time is answered 429 with Retry-After, and a 429 or 503 with Retry-After from an upstream
holds its bucket back for the whole fleet.`

const examples = `  tokenbucket gateway --upstream http://localhost:9000 --limits sqlite://limits.db --redis localhost:6379 --create-table
  tokenbucket gateway --upstream http://localhost:9000 --limits file:///etc/tokenbucket/limits.yaml --redis localhost:6379
  TOKENBUCKET_LIMITS=mysql://user:password@db:3306/limits tokenbucket gateway --config gateway.yaml`

var settingsHelp = `Settings:
  Each flag may also be a key of the file that --config names, or an environment variable: interval: 2s is
  TOKENBUCKET_INTERVAL=2s is --interval 2s. Flags win over the environment, the environment over the file. A list is a list
  in the file, with commas in the environment. Passwords belong into the file or the environment, not into flags, which
  every user of the machine can see; the gateway prints none.

Admin:
  /healthz  200 while the process lives
  /readyz   200 if limits are loaded, and Redis answers (or --fail lets calls go on without it); 503 if not, while draining, and
            beyond --max-age
  /stats    limits in force, loads and calls, in JSON
  /metrics  the same for Prometheus; docs/operations.md says what to alert on
  /console  every limit of the fleet, for people: docs/console.md

Signals:
  SIGHUP reads the settings and the limits again. These change at once: ` + strings.Join(live, ", ") + `.
  The others need a new process, and the log names those that have changed. What is wrong changes nothing.
  The first SIGTERM or Ctrl-C drains: no new connections, and what is under way may end within --drain. The second one ends
  the process at once.

Exit status:
  0 in order, 1 calls were cut off, 2 could not start; 143 or 130 (128 and the signal) after a second SIGTERM or Ctrl-C
`

// Command is the cobra command.
func Command() *cobra.Command {
	o := new(options)
	groups := o.flags()
	cmd := &cobra.Command{
		Use:     "gateway",
		Short:   "Run a reverse proxy with limits from a table or a file",
		Long:    long,
		Example: examples,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 { // which may well be a DSN: not printed
				return fmt.Errorf("gateway: %d arguments too many: want flags only, each value after its flag", len(args))
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

// complete tells a shell the values of flags that have few.
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

// must is for what only a mistake in this package can make fail.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// group is flags under one title.
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
