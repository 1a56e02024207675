// Command tokenbucket demonstrates the token bucket, and runs a gateway that uses it.
//
//	tokenbucket demo     three gateways, one bucket, one upstream: watch the fleet keep to the rate
//	tokenbucket plot     draws a fleet with one limit, priorities, the warm-up curve and the permits handed out over time
//	tokenbucket gateway  a reverse proxy whose limits are in a database or a file
//	tokenbucket check    shows what a gateway with these settings would do, and reports faults
//	tokenbucket console  web pages that show every limit of a fleet
//	tokenbucket confirm  confirms that a table which has lost most of its rows is correct
//	tokenbucket version  prints the version of this build
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	gatewaycmd "github.com/go-tokenbucket/tokenbucket/cmd/internal/gateway"
)

// Exit statuses.
const (
	exitOK     = 0
	exitBroken = 1 // the demo's bound was broken, or calls failed; the gateway cut off calls; the check found a fault
	exitUsage  = 2 // a flag is invalid, or a dependency of the command could not start
)

// errBroken is returned if the demo's verdict is bad. The verdict has been printed already.
var errBroken = errors.New("bound broken")

func main() {
	redis.SetLogger(silent{})
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first Ctrl-C ends the demo early, with its table, or drains the gateway; the second one ends the process
	os.Exit(run(ctx, options.limiter, os.Args[1:], os.Stdout, os.Stderr))
}

// silent discards go-redis' log, which would disturb the demo's output. No error is lost: a call returns and counts each one.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func run(ctx context.Context, limit limiterFunc, args []string, stdout, stderr io.Writer) int {
	cmd := rootCommand(limit)
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	switch err := cmd.ExecuteContext(ctx); {
	case err == nil:
		return exitOK
	case errors.Is(err, errBroken), errors.Is(err, gatewaycmd.ErrCutOff), errors.Is(err, gatewaycmd.ErrFaulty): // printed or logged already
		return exitBroken
	default:
		fmt.Fprintf(stderr, "tokenbucket: %v\n", err)
		return exitUsage
	}
}

func rootCommand(limit limiterFunc) *cobra.Command {
	cmd := &cobra.Command{
		Use:           "tokenbucket",
		Short:         "A token bucket that a fleet of gateways shares",
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version(),
	}
	cmd.SetVersionTemplate("tokenbucket {{.Version}}\n")
	cmd.AddCommand(demoCommand(limit), plotCommand(), gatewaycmd.Command(), gatewaycmd.CheckCommand(), gatewaycmd.ConsoleCommand(), gatewaycmd.ConfirmCommand(), versionCommand())
	return cmd
}

// flagError returns an error that names a flag, its value and what is accepted.
func flagError(flag string, value any, want string) error {
	return fmt.Errorf("--%s %v: want %s", flag, value, want)
}
