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
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/registry"
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
	f.BoolVar(&o.console, "console", true, "serve the console at /console of --admin; do not with --console=false")
	f.StringVar(&o.users, "console-users", "", "`file` of who may see the console from anywhere: lines of \"write NAME TOKEN\" or \"read NAME TOKEN\". "+
		"Without it nobody can change anything, and only this machine may look")
	f.StringSliceVar(&o.hosts, "console-host", nil, "`name` under which the console is asked, besides localhost and IP addresses; may be repeated")
	f.StringSliceVar(&o.readers, "console-reader", nil, "`CIDR` of who may look without a name; may be repeated; none: this machine")
	f.StringSliceVar(&o.forwarded, "console-proxy", nil, "`CIDR` of proxies whose X-Forwarded-User names somebody who may look and change; may be repeated")
}

// parseConsole reads who may see the console, and who may change something.
func (c *config) parseConsole() (err error) {
	c.access.Hosts, c.access.Forwarders = c.hosts, c.proxies
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

// formKey is the key of forms: the same wherever the file of users is the same. It is slow on purpose, so that nobody who sees a form can
// try what the file may say.
func formKey(users []byte) ([]byte, error) {
	return pbkdf2.Key(sha256.New, string(users), []byte("tokenbucket console"), 100_000, sha256.Size)
}

// consoleOf makes a console. What it may not do is nil: without a database there is no editor.
func (c *config) consoleOf(source console.Source, limits *registry.Registry, editor *sqlsource.Editor, sw *registry.PolledSwitch, log *slog.Logger) (*console.Console, error) {
	about := console.Config{Source: source, Access: c.access, Log: log}
	if editor != nil {
		about.Editor = editor
	}
	if limits != nil {
		about.Rows = limits.Limits
		about.Penalize = console.PenalizeIn(limits)
		about.Reset = console.ResetIn(limits)
	}
	switch {
	case c.switchAt == "sql" && editor != nil:
		about.Turn = func(ctx context.Context, on bool, who, why string) error {
			_, err := editor.SetSwitch(ctx, on, who, why)
			return err
		}
	case c.switchAt != "" && sw != nil && editor != nil:
		about.Turn = func(ctx context.Context, on bool, who, why string) error { return turn(ctx, editor, sw, on, who, why) }
	case c.switchAt != "" && sw != nil:
		about.Turn = func(ctx context.Context, on bool, _, _ string) error { return sw.Set(ctx, on) }
	}
	return console.New(about)
}

// auditWait is how long a switch waits for the audit: an outage of the database, in which it may hang, is when it is needed.
const auditWait = 2 * time.Second

// turn turns a switch that is in no table, and has it in the audit. A database that is away does not keep it from being turned: then the
// error is a console.ErrNotAudited.
func turn(ctx context.Context, editor console.Editor, sw *registry.PolledSwitch, on bool, who, why string) error {
	what := "switch off: every call passes"
	if on {
		what = "switch on: limits apply"
	}
	noted := false
	inTime, cancel := context.WithTimeout(ctx, auditWait)
	defer cancel()
	_, err := editor.Act(inTime, sqlsource.Action{What: what, Who: who, Why: why}, func(context.Context) error {
		noted = true
		return sw.Set(ctx, on)
	})
	if err == nil || noted || refused(err) {
		return err
	}
	if failed := sw.Set(ctx, on); failed != nil {
		return errors.Join(failed, err)
	}
	return fmt.Errorf("%w: %w", console.ErrNotAudited, err)
}

// refused tells whether an audit that could be asked says no, which somebody must repair.
func refused(err error) bool {
	var right *sqlsource.RightError
	var wrong *registry.RowError
	return errors.Is(err, sqlsource.ErrNoAudit) || errors.As(err, &right) || errors.As(err, &wrong) || misfits(err)
}

// openConsole puts the console at the admin port.
func (s *service) openConsole(client redis.UniversalClient, limits *registry.Registry) error {
	c := s.config
	if !c.console || c.options.admin == "" || client == nil || !c.published() {
		return nil
	}
	made, err := c.consoleOf(console.NewRedisSource(client, c.keyPrefix), limits, s.editor, s.admin.sw.Load(), s.log)
	if err != nil {
		return err
	}
	s.onClose(made.Close)
	s.admin.console.Store(made)
	return nil
}

// serveConsole answers what is asked of the console.
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

// newEditor makes what changes rows; nil where there is no database, or nobody who may.
func (s *service) newEditor(db *sql.DB) (*sqlsource.Editor, error) {
	if db == nil || len(s.config.access.Users)+len(s.config.access.Proxies) == 0 {
		return nil, nil
	}
	d := s.config.database
	return sqlsource.NewEditor(db, d.dialect, d.options...)
}
