package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite" // the driver of that name

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	consolefleet "github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// show is the demo with a console: gateways in this process, a table of limits in SQLite, and traffic that comes and goes.
type show struct {
	out       io.Writer
	backend   *backend
	client    *redis.Client // for everything except buckets
	db        *sql.DB
	exports   *semaphore.Semaphore
	letters   *slidingwindow.Limiter
	columns   sqlsource.Option
	instances int
	demand    float64 // factor for the demand of demoRows
	closers   []func()
}

// demoRows are the limits of the demo besides /ibe/AvailFare, whose limit the flags set. Demand is in calls per second, of all gateways.
var demoRows = []struct {
	name, row string // rate, max_wait, burst, warmup, quota
	demand    float64
}{
	{"/ibe/Book", "20, 0.5, NULL, NULL, 0", 14},
	{"/pay/Capture", "10, 0.2, NULL, NULL, 1", 13},
	{"/pay/Refund", "2, 1, 10, NULL, 0", 1.5},
	{"/cold/Report", "4, 0.5, NULL, 20, 0", 3},
	{"/slow/Upstream", "15, 0.5, NULL, NULL, 0", 12},
	{"/search/Suggest", "40, 0, 80, NULL, 0", 30},
	{"/old/Search", "0, 0.5, NULL, NULL, 0", 0.4},
	{"/quiet/Nightly", "1, 0.5, NULL, NULL, 0", 0},
	{"/bad/Row", "-3, 0.5, NULL, NULL, 0", 0.6},
}

func (s *show) onClose(f func()) { s.closers = append(s.closers, f) }

func (s *show) close() {
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
}

// showConsole runs the demo with a console until ctx ends.
func (d *demo) showConsole(ctx context.Context) error {
	b, err := openBackend(ctx, &d.options)
	if err != nil {
		return err
	}
	s := &show{
		out: d.out, backend: b, instances: d.instances, demand: 1,
		columns: sqlsource.WithColumns(sqlsource.Columns{Burst: "burst", Warmup: "warmup", Quota: "quota"}),
	}
	s.onClose(b.close)
	defer s.close()
	slog.SetDefault(slog.New(slog.DiscardHandler)) // some rows are bad on purpose
	if err := s.openTable(ctx, d); err != nil {
		return err
	}
	if err := s.openOthers(); err != nil {
		return err
	}
	for i := range s.instances {
		if err := s.startGateway(ctx, i); err != nil {
			return err
		}
	}
	return s.serve(ctx, d.consoleAt)
}

// openTable creates the table of limits, in a temporary SQLite file.
func (s *show) openTable(ctx context.Context, d *demo) error {
	dir, err := os.MkdirTemp("", "tokenbucket-demo")
	if err != nil {
		return err
	}
	s.onClose(func() { _ = os.RemoveAll(dir) })
	file := &url.URL{Scheme: "file", Opaque: filepath.Join(dir, "limits.db"), RawQuery: "_pragma=busy_timeout(2000)"}
	if s.db, err = sql.Open("sqlite", file.String()); err != nil {
		return err
	}
	s.onClose(func() { _ = s.db.Close() })
	err = errors.Join(sqlsource.CreateTable(ctx, s.db, sqlsource.SQLite, s.columns), editor.CreateAuditTable(ctx, s.db, sqlsource.SQLite))
	if err != nil {
		return err
	}
	const insert = "INSERT INTO t_ratelimite_conf (name, rate, max_wait, burst, warmup, quota) VALUES "
	_, err = s.db.ExecContext(ctx, insert+"(?, ?, ?, ?, NULL, 0)", bucketName, d.rate, d.maxWait.Seconds(), d.burst)
	for _, r := range demoRows {
		if err == nil {
			_, err = s.db.ExecContext(ctx, insert+"(?, "+r.row+")", r.name)
		}
	}
	return err
}

// openOthers creates a semaphore and a window for the console to show.
func (s *show) openOthers() (err error) {
	s.client = s.backend.connect()
	s.onClose(func() { removeAll(s.client, s.backend.prefix); _ = s.client.Close() })
	if s.exports, err = semaphore.NewMemory(4, semaphore.WithLabel("export")); err != nil {
		return err
	}
	s.letters, err = slidingwindow.New("letters", 100, time.Minute, time.Second)
	return err
}

// startGateway starts one gateway. It has a store and a registry of its own, as if it ran on a machine of its own.
func (s *show) startGateway(ctx context.Context, i int) error {
	source, err := sqlsource.New(s.db, sqlsource.SQLite, s.columns)
	if err != nil {
		return err
	}
	meter := consolefleet.NewMeter(consolefleet.WithInfo(func(info *consolefleet.Info) {
		info.Host, info.PID, info.Version = fmt.Sprintf("gateway-%d", i+1), 1, "demo"
		info.Store.Kind, info.Store.Policy = "script", "closed"
		s.others(info)
	}))
	limits, err := registry.New(source, s.backend.newStore(), registry.WithInterval(time.Second), registry.WithUnknown(registry.Pass()),
		registry.WithLogger(slog.New(slog.DiscardHandler)), registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(10*time.Second), tokenbucket.WithObserver(meter.Observer())), registry.WithBypassHook(meter.Bypassed),
		registry.WithHook(meter.Loaded))
	if err != nil {
		return err
	}
	s.onClose(limits.Close)
	meter.Follow(limits)
	publisher, err := consolefleet.NewPublisher(s.client, meter, consolefleet.WithKeyPrefix(s.backend.prefix))
	if err != nil {
		return err
	}
	s.onClose(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = publisher.Close(ctx)
	})
	s.traffic(ctx, limits, meter, i)
	return nil
}

// others adds the semaphore and the window to the published state.
func (s *show) others(info *consolefleet.Info) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	stats, _ := s.exports.Stats(ctx)
	one := consolefleet.Semaphore{Name: "nightly exports", Permits: 4, Used: stats.Used, Waiting: stats.Waiting}
	holders, _ := s.exports.Holders(ctx)
	for _, h := range holders {
		one.Holders = append(one.Holders, consolefleet.Holder{Fence: h.Fence, Label: h.Label, Permits: h.Permits, Since: h.Since, Expires: h.Expires})
	}
	info.Semaphores = append(info.Semaphores, one)
	left, _ := s.letters.Remaining(ctx)
	info.Windows = append(info.Windows, consolefleet.Window{Name: "letters a minute", Limit: 100, Used: int64(100 - left), Length: time.Minute})
}

// serve serves the console until ctx ends.
func (s *show) serve(ctx context.Context, at string) error {
	source, err := sqlsource.New(s.db, sqlsource.SQLite, s.columns)
	if err != nil {
		return err
	}
	edit, err := editor.New(s.db, source)
	if err != nil {
		return err
	}
	limits, err := registry.New(source, s.backend.newStore(), registry.WithInterval(time.Second), registry.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	s.onClose(limits.Close)
	token := rand.Text()
	c, err := console.New(console.Config{
		Source: console.NewRedisSource(s.client, s.backend.prefix), Rows: limits.Limits, Editor: edit, Penalize: console.PenalizeIn(limits), Reset: console.ResetIn(limits),
		Announce: func(ctx context.Context, e consolefleet.Event) error {
			return consolefleet.Announce(ctx, s.client, e, consolefleet.WithKeyPrefix(s.backend.prefix))
		},
		Access: console.Access{Users: []console.User{{Name: "demo", Token: token, Write: true}}},
	})
	if err != nil {
		return err
	}
	s.onClose(c.Close)
	l, err := net.Listen("tcp", at)
	if err != nil {
		return flagError("console-listen", fmt.Sprintf("%q", at), "an address that can be listened on: "+err.Error())
	}
	server := &http.Server{Handler: c, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { c.Close(); _ = server.Close() })()
	fmt.Fprintf(s.out, "%s, %d limits in a table of their own, and traffic that comes and goes.\n\n  console  http://%s/\n  user     demo\n  token    %s\n\n"+
		"Without them the console is read-only. Ctrl-C ends it, and leaves nothing behind.\n", plural(s.instances, "gateway", "gateways"), len(demoRows)+1, l.Addr(), token)
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
