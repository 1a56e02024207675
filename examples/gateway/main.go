// Command gateway is an example of a reverse proxy in front of an airline's booking system. It makes no more calls than the limits in a
// database allow. The limits are rows, which you change while it runs.
//
//	go run ./examples/gateway
//
// needs no other program. The limits are in a SQLite file that it creates, the buckets are in an embedded Redis, and the airline is a stub that
// counts its callers. The command prints what to try. With --redis, start several: they share the buckets.
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

// options hold the addresses of database and Redis. Empty ones are created.
type options struct {
	listen                string
	file, mysql, postgres string // at most one is set
	redis                 string
	statement             string // SQL to execute instead of running
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

// gateway holds everything that runs.
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

	// The limits are rows of a table. Any client that may write to the table can change them.
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

	// The buckets are keys in Redis, one for each row, shared by all gateways.
	if o.redis == "" {
		embedded := miniredis.NewMiniRedis()
		embedded.ClockTTL(true) // keys expire as in a real Redis
		if err := embedded.Start(); err != nil {
			return nil, err
		}
		g.onClose(embedded.Close)
		o.redis = embedded.Addr()
	}
	client := redis.NewClient(&redis.Options{Addr: o.redis})
	g.onClose(func() { _ = client.Close() })

	// The registry creates a limiter for each row, and polls the table. The airline counts its callers in any sliding second, so the rows are
	// quotas: see tokenbucket.NewQuota. The switch is a row, too.
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

	// The airline, and the proxy in front of it. The transport takes a permit for each call before it sends the call. The bucket has the name of
	// the call's path.
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
	g.url, err = g.serve(o.listen, httplimit.CanonicalHandler(&httputil.ReverseProxy{ // limit and forward the same path
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.SetXForwarded()
			r.Out.Header.Del("Upgrade") // calls of another protocol would not be counted
			r.Out.Header.Del("Connection")
		},
		Transport:    transport,
		ErrorHandler: unavailable,
	}))
	return g, err
}

// unavailable responds with 503 during an outage of Redis or of the airline. To let calls pass during an outage of Redis instead, use
// registry.WithLimiterOptions(tokenbucket.WithFailurePolicy(tokenbucket.FailOpen)).
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
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, DisableGeneralOptionsHandler: true}
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

// close runs the closers, the last one first.
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
