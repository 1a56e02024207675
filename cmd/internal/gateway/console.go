package gateway

import (
	"context"
	"crypto/pbkdf2"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

type consoleOptions struct {
	console   bool
	users     string
	hosts     []string
	readers   []string
	forwarded []string
}

func (o *consoleOptions) flags(f *pflag.FlagSet) {
	f.BoolVar(&o.console, "console", true, "serve the console at /console of --admin; disable it with --console=false")
	f.StringVar(&o.users, "console-users", "", "`file` of the console's users: lines of \"write NAME TOKEN\" or \"read NAME TOKEN\". "+
		"Without it the console is read-only, and for this machine alone")
	f.StringSliceVar(&o.hosts, "console-host", nil, "host `name` of the console, besides localhost and IP addresses; may be repeated")
	f.StringSliceVar(&o.readers, "console-reader", nil, "`CIDR` of clients that may read without signing in; may be repeated; default: this machine")
	f.StringSliceVar(&o.forwarded, "console-proxy", nil, "`CIDR` of proxies whose X-Forwarded-User names a user who may read and change; may be repeated")
}

// parseConsole parses the settings of the console's access control.
func (c *config) parseConsole() (err error) {
	c.access.Hosts, c.access.Forwarders = slices.Concat(c.hosts, c.adminHosts), c.proxies
	if own, err := os.Hostname(); err == nil {
		c.access.Hosts = append(c.access.Hosts, own)
	}
	if c.access.Readers, err = c.networks("console-reader", c.readers); err != nil {
		return err
	}
	if c.access.Proxies, err = c.networks("console-proxy", c.forwarded); err != nil {
		return err
	}
	if c.users == "" {
		return nil
	}
	text, err := os.ReadFile(c.users)
	if err == nil {
		c.access.Users, err = console.ParseUsers(text)
	}
	if err == nil && len(c.access.Users) > 0 {
		c.access.Key, err = formKey(text)
	}
	if err != nil {
		return c.bad("console-users", fmt.Sprintf("%q", c.users), "a file of users: "+err.Error())
	}
	return nil
}

// formKey derives the key that signs forms. It is the same on all instances with the same users file. It is slow on purpose: a user who has a
// form could otherwise guess the tokens in the file offline.
func formKey(users []byte) ([]byte, error) {
	return pbkdf2.Key(sha256.New, string(users), []byte("tokenbucket console"), 100_000, sha256.Size)
}

// consoleOf returns a console. Features that the settings do not provide stay nil: without a database there is no editor.
func (c *config) consoleOf(client redis.UniversalClient, limits *registry.Registry, edit *editor.Editor, sw *killswitch.Switch, here func() console.Here, log *slog.Logger) (*console.Console, error) {
	confirmations, err := c.confirmations(client)
	if err != nil {
		return nil, err
	}
	about := console.Config{Source: console.NewRedisSource(client, c.keyPrefix), Access: c.access, Log: log, Confirm: confirmations.Confirm, Here: here}
	about.Announce = func(ctx context.Context, e fleet.Event) error {
		return fleet.Announce(ctx, client, e, fleet.WithKeyPrefix(c.keyPrefix))
	}
	if edit != nil {
		about.Editor = edit
	}
	if limits != nil {
		about.Rows = limits.Limits
		about.Penalize = console.PenalizeIn(limits)
		about.Reset = console.ResetIn(limits)
	}
	switch {
	case c.switchAt == "sql" && edit != nil:
		about.Turn = func(ctx context.Context, on bool, who, why string) error {
			_, err := edit.SetSwitch(ctx, on, who, why)
			return err
		}
	case c.switchAt != "" && sw != nil && edit != nil:
		about.Turn = func(ctx context.Context, on bool, who, why string) error { return turn(ctx, edit, sw, on, who, why) }
	case c.switchAt != "" && sw != nil:
		about.Turn = func(ctx context.Context, on bool, _, _ string) error { return sw.Set(ctx, on) }
	}
	return console.New(about)
}

// auditWait bounds how long turning the switch waits for the audit. The switch is needed most during an outage of the database, which may
// hang.
const auditWait = 2 * time.Second

// turn turns a switch that is not in the database, and writes it to the audit. An outage of the database does not prevent that: turn then
// returns a console.ErrNotAudited.
func turn(ctx context.Context, edit console.Editor, sw *killswitch.Switch, on bool, who, why string) error {
	what := "switch off: every call passes"
	if on {
		what = "switch on: limits apply"
	}
	attempted := false
	inTime, cancel := context.WithTimeout(ctx, auditWait)
	defer cancel()
	_, err := edit.Act(inTime, editor.Action{What: what, Who: who, Why: why}, func(context.Context) error {
		attempted = true
		return sw.Set(ctx, on)
	})
	if err == nil || attempted || refused(err) {
		return err
	}
	if failed := sw.Set(ctx, on); failed != nil {
		return errors.Join(failed, err)
	}
	return fmt.Errorf("%w: %w", console.ErrNotAudited, err)
}

// refused reports whether the audit is reachable and refused the entry, which needs a repair.
func refused(err error) bool {
	var right *sqlsource.RightError
	var wrong *registry.RowError
	return errors.Is(err, editor.ErrNoAudit) || errors.As(err, &right) || errors.As(err, &wrong) || misfits(err)
}

// openConsole adds the console to the admin port.
func (s *service) openConsole(client redis.UniversalClient, limits *registry.Registry) error {
	c := s.config
	if !c.console || c.options.admin == "" || client == nil || !c.published() {
		return nil
	}
	made, err := c.consoleOf(client, limits, s.editor, s.admin.sw.Load(), s.admin.here, s.log)
	if err != nil {
		return err
	}
	s.onClose(made.Close)
	s.admin.console.Store(made)
	return nil
}

// serveConsole serves /console/, with 503 while there is no console.
func (a *admin) serveConsole(w http.ResponseWriter, r *http.Request) {
	c := a.console.Load()
	if c == nil {
		text := "the limits are not loaded yet"
		if !a.config.console || !a.config.published() {
			text = "there is no console: it needs Redis, --publish and --console"
		}
		w.Header().Set("Retry-After", "1")
		http.Error(w, text, http.StatusServiceUnavailable)
		return
	}
	http.StripPrefix("/console", c).ServeHTTP(w, r)
}

// newEditor returns the editor of the rows, or nil if there is no database or no user who may change rows.
func (s *service) newEditor(db *sql.DB) (*editor.Editor, error) {
	if db == nil || len(s.config.access.Users)+len(s.config.access.Proxies) == 0 {
		return nil, nil
	}
	d := s.config.database
	source, err := sqlsource.New(db, d.dialect, d.options...)
	if err != nil {
		return nil, err
	}
	return editor.New(db, source)
}
