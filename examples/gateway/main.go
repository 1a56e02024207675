// Command gateway is an example: a reverse proxy in front of an airline's booking system that makes no more calls than the
// limits in a database allow. The limits are rows, which you change while it runs.
//
//	go run ./examples/gateway
//
// needs nothing else: the limits are in a SQLite file that it creates, the buckets in an embedded Redis, and the airline is
// a stub that counts its callers. It prints what to try. With --redis, start several, and they share the buckets.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// options say where things are. Empty ones are made.
type options struct {
	listen                string
	file, mysql, postgres string // of these one
	redis                 string
	statement             string // to execute instead of running
}

func main() {
	var o options
	flag.StringVar(&o.listen, "listen", "127.0.0.1:8080", "address to serve on")
	flag.StringVar(&o.file, "db", "", "SQLite `file` with the limits (default a new one)")
	flag.StringVar(&o.mysql, "mysql", "", "`DSN` of a MySQL or MariaDB instead: user:password@tcp(host:3306)/database")
	flag.StringVar(&o.postgres, "postgres", "", "`DSN` of a PostgreSQL instead: postgres://user:password@host:5432/database")
	flag.StringVar(&o.redis, "redis", "", "`host:port` of a Redis (default an embedded one)")
	flag.StringVar(&o.statement, "exec", "", "`SQL` to execute in that database instead of running the gateway")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	if o.statement != "" {
		db, err := openDatabase(&o)
		if err != nil {
			return err
		}
		defer db.Close()
		_, err = db.ExecContext(ctx, o.statement)
		return err
	}
	g, err := start(ctx, o)
	if err != nil {
		return err
	}
	defer g.close()
	g.explain(out)
	<-ctx.Done()
	return nil
}

// gateway is all that runs.
type gateway struct {
	options options
	url     string
	airline *airline
	limits  *registry.Registry
	closers []func()
}

func start(ctx context.Context, o options) (_ *gateway, err error) {
	g := &gateway{options: o}
	defer func() {
		if err != nil {
			g.close()
		}
	}()

	// The limits: rows of a table, which everybody who may write to it can change.
	if g.options.file == "" && o.mysql == "" && o.postgres == "" {
		dir, err := os.MkdirTemp("", "gateway")
		if err != nil {
			return nil, err
		}
		g.onClose(func() { _ = os.RemoveAll(dir) })
		g.options.file = filepath.Join(dir, "limits.db")
	}
	db, err := openDatabase(&g.options)
	if err != nil {
		return nil, err
	}
	g.onClose(func() { _ = db.Close() })
	if err := createLimits(ctx, db, g.options.dialect()); err != nil {
		return nil, err
	}

	// The buckets: keys in Redis, one for each row, shared by all gateways.
	if o.redis == "" {
		embedded := miniredis.NewMiniRedis()
		embedded.ClockTTL(true) // keys expire as in a real one
		if err := embedded.Start(); err != nil {
			return nil, err
		}
		g.onClose(embedded.Close)
		o.redis = embedded.Addr()
	}
	client := redis.NewClient(&redis.Options{Addr: o.redis})
	g.onClose(func() { _ = client.Close() })

	// The registry makes a limiter of each row, and follows the table. The airline counts its callers in any sliding second,
	// so the rows are quotas: see tokenbucket.ForQuota. The switch is a row, too.
	source, err := sqlsource.New(db, g.options.dialect(), sqlsource.WithQuota(20*time.Millisecond))
	if err != nil {
		return nil, err
	}
	sw, err := sqlsource.NewSwitch(db, g.options.dialect())
	if err != nil {
		return nil, err
	}
	g.onClose(sw.Close)
	g.limits, err = registry.New(source, tokenbucket.NewRedisScriptStore(client),
		registry.WithInterval(time.Second), registry.WithSwitch(sw))
	if err != nil {
		return nil, err
	}
	g.onClose(g.limits.Close)

	// The airline, and the proxy in front of it. The transport takes a permit for each call before it leaves: its bucket is
	// the one that is named like the call's path.
	g.airline = newAirline()
	airlineURL, err := g.serve("127.0.0.1:0", g.airline)
	if err != nil {
		return nil, err
	}
	base := http.DefaultTransport.(*http.Transport).Clone()
	g.onClose(base.CloseIdleConnections)
	transport, err := httplimit.NewTransport(g.limits, httplimit.WithBase(base), httplimit.WithRefusalResponse())
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(airlineURL)
	if err != nil {
		return nil, err
	}
	g.url, err = g.serve(o.listen, &httputil.ReverseProxy{
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(target); r.SetXForwarded() },
		Transport:    transport,
		ErrorHandler: unavailable,
	})
	return g, err
}

// unavailable answers when nothing could be decided, since Redis is away, or when the airline is. Letting calls pass
// meanwhile would be the other possibility: registry.WithLimiterOptions(tokenbucket.WithFailurePolicy(tokenbucket.FailOpen)).
func unavailable(w http.ResponseWriter, _ *http.Request, err error) {
	slog.Warn("a call failed", "error", err)
	status := http.StatusBadGateway
	var undecided *httplimit.GateError
	if errors.As(err, &undecided) {
		status = http.StatusServiceUnavailable
	}
	http.Error(w, http.StatusText(status), status)
}

func (g *gateway) serve(addr string, h http.Handler) (url string, err error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", err
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(l) }()
	g.onClose(func() {
		ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
		defer stop()
		_ = server.Shutdown(ctx)
		_ = server.Close()
		<-ended
	})
	return "http://" + l.Addr().String(), nil
}

func (g *gateway) onClose(f func()) { g.closers = append(g.closers, f) }

// close undoes what was opened, last first.
func (g *gateway) close() {
	for i := len(g.closers) - 1; i >= 0; i-- {
		g.closers[i]()
	}
}

func openDatabase(o *options) (*sql.DB, error) {
	switch o.dialect() {
	case sqlsource.MySQL:
		return sql.Open("mysql", o.mysql)
	case sqlsource.PostgreSQL:
		return sql.Open("pgx", o.postgres)
	}
	return sql.Open("sqlite", "file:"+(&url.URL{Path: o.file}).EscapedPath()+"?_pragma=busy_timeout(2000)")
}

func (o *options) dialect() sqlsource.Dialect {
	switch {
	case o.mysql != "":
		return sqlsource.MySQL
	case o.postgres != "":
		return sqlsource.PostgreSQL
	}
	return sqlsource.SQLite
}
