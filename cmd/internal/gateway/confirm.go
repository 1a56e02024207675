package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// lossOptions returns the options that decide when the registry accepts a table that has lost more than half of its rows.
func (c *config) lossOptions(client redis.UniversalClient) (opts []registry.Option, err error) {
	switch {
	case c.allowEmpty:
		opts = append(opts, registry.WithAllowEmpty())
	case c.confirm:
		opts = append(opts, registry.WithConfirmedLosses())
	}
	if client == nil { // without Redis only a restart confirms a loss
		return opts, nil
	}
	confirmations, err := c.confirmations(client)
	return append(opts, registry.WithConfirmations(confirmations)), err
}

// confirmations returns the fleet's store of confirmations, in Redis.
func (c *config) confirmations(client redis.UniversalClient) (*registry.RedisConfirmations, error) {
	return registry.NewRedisConfirmations(client, c.keyPrefix+"confirmed")
}

const confirmLong = `Confirms that a table which is empty, or has lost more than half of its rows, is correct. Gateways report such a loss in
/readyz, in /metrics, in the log and on the console until it is confirmed, or until the rows are back. They apply a confirmation
within about a second; with --confirm-losses they keep the lost limits in force until then.

It needs the Redis and the --key-prefix of the gateways, and accepts their file and variables, too. If no gateway reports a loss, it
changes nothing, and its exit status is 1.`

// confirmFlags are the gateway's flags that the help shows.
var confirmFlags = []string{"redis", "key-prefix", "config"}

// confirmPatience is how long the command waits for the gateways.
const confirmPatience = 10 * time.Second

// ConfirmCommand returns the command tokenbucket confirm.
func ConfirmCommand() *cobra.Command {
	o := new(options)
	var who, why string
	cmd := &cobra.Command{
		Use: "confirm", Short: "Confirm that a table which has lost most of its rows is correct", Long: confirmLong, Args: cobra.NoArgs,
		Example: `  tokenbucket confirm --redis localhost:6379 --why "the limits have moved to another table"`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.load(cmd.Flags(), os.Environ()); err != nil {
				return err
			}
			c := &config{options: *o}
			if c.store == "memory" {
				return c.bad("store", `"memory"`, "script or lock: a gateway with --store memory reads no confirmations; restart it instead")
			}
			if err := c.parseBuckets(); err != nil {
				return err
			}
			if why == "" {
				return fmt.Errorf("--why missing: want a reason, for the log")
			}
			client := c.redis.open()
			defer func() { _ = client.Close() }()
			ctx, cancel := context.WithTimeout(cmd.Context(), confirmPatience)
			defer cancel()
			return c.confirmLoss(ctx, client, cmp.Or(who, userName()), why, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&why, "why", "", "`reason`, for the log")
	f.StringVar(&who, "who", "", "`name` of the person who confirms, for the log (default: the user of this process)")
	for _, g := range o.flags() {
		g.flags.VisitAll(func(flag *pflag.Flag) { flag.Hidden = true })
		for _, name := range confirmFlags {
			if flag := g.flags.Lookup(name); flag != nil {
				flag.Hidden = false
			}
		}
		f.AddFlagSet(g.flags)
	}
	complete(cmd)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return flagError(cmd.Flags(), err) })
	return cmd
}

func userName() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "unknown"
}

// errNothingLost is printed if no gateway reports a loss.
var errNothingLost = errors.New("nothing to confirm: no gateway reports a table that has lost more than half of its rows")

// confirmLoss confirms the losses that gateways report, and waits until the gateways have applied the confirmation.
func (c *config) confirmLoss(ctx context.Context, client redis.UniversalClient, who, why string, to io.Writer) error {
	reader := fleet.NewReader(client, fleet.WithKeyPrefix(c.keyPrefix))
	lost, err := losses(ctx, reader)
	if err != nil {
		return err
	}
	for _, i := range lost {
		fmt.Fprintf(to, "%s:%d: %d of %d limits are gone from the table\n", i.Host, i.PID, i.Loads.Gone, i.Loads.Before)
	}
	if len(lost) == 0 {
		fmt.Fprintln(to, errNothingLost)
		return ErrFaulty
	}
	confirmations, err := c.confirmations(client)
	if err != nil {
		return err
	}
	if err := confirmations.Confirm(ctx, who, why); err != nil {
		return err
	}
	for len(lost) > 0 {
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			fmt.Fprintf(to, "%d gateways have not applied the confirmation within %v: check their logs\n", len(lost), confirmPatience)
			return ErrFaulty
		}
		if lost, err = losses(ctx, reader); err != nil {
			return err
		}
	}
	fmt.Fprintln(to, "confirmed: every gateway has applied it")
	return nil
}

// losses returns the live instances that report a loss.
func losses(ctx context.Context, reader *fleet.Reader) (all []fleet.Instance, err error) {
	s, err := reader.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	for i := range s.Instances {
		if one := s.Instances[i]; !one.Silent(s.At) && one.Loads.Gone > 0 {
			all = append(all, one)
		}
	}
	return all, nil
}
