package gateway

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// run serves until ctx ends, then drains.
func (c *config) run(ctx context.Context, logTo io.Writer) error {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP) // by default SIGHUP ends the process
	defer signal.Stop(hangups)
	level := new(slog.LevelVar)
	level.Set(c.level)
	log := c.newLog(logTo, level)
	slog.SetDefault(log) // the library logs there too
	c.logUnknownVariables(log)
	p, err := newProxy(c, log)
	if err != nil {
		return err
	}
	s := &service{config: c, log: log, level: level, proxy: p}
	s.admin = &admin{config: c, began: time.Now(), proxy: p}
	p.metrics.add(s.admin)
	defer s.close()
	if err := s.listen(); err != nil {
		return err
	}
	if c.otlp != "" {
		stop, err := p.metrics.export(c, log)
		if err != nil {
			return err
		}
		s.onClose(stop)
	}
	if err := s.start(ctx); err != nil {
		if ctx.Err() != nil {
			log.Info("the gateway has stopped before its limits were loaded")
			return nil
		}
		return err
	}
	s.logReady(ctx)
	telling, stop := context.WithCancel(context.Background())
	told := make(chan struct{})
	go func() { defer close(told); s.admin.tell(telling, log) }()
	s.onClose(func() { stop(); <-told })
	for {
		select {
		case <-hangups:
			s.reload(ctx)
		case <-ctx.Done():
			return s.drain()
		case err := <-s.broken:
			log.Error("a server of the gateway failed, so the gateway stops and cuts off its calls", "error", err)
			return fmt.Errorf("%w: %w", ErrCutOff, err)
		}
	}
}

// logReady logs that the gateway serves calls, with the state of Redis.
func (s *service) logReady(ctx context.Context) {
	level, c := slog.LevelInfo, s.config
	about := []any{"limits", len(s.proxy.metrics.limits.Load().Limits()), "from", hideDSN(c.limits), "store", c.store}
	if s.admin.pulse != nil {
		state := "ok"
		if err := s.admin.pulse.waitFirst(ctx, 3*heartbeat); err != nil {
			level, state = slog.LevelWarn, err.Error()
		}
		about = append(about, "redis", state)
	}
	s.log.Log(ctx, level, "ready", about...)
}

func (c *config) newLog(w io.Writer, level slog.Leveler) *slog.Logger {
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration { // JSON would show nanoseconds
			a.Value = slog.StringValue(a.Value.Duration().String())
		}
		return a
	}}
	if c.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// service is a running gateway.
type service struct {
	config *config
	log    *slog.Logger
	level  *slog.LevelVar
	proxy  *proxy
	admin  *admin
	editor *editor.Editor // nil if the console cannot change rows

	public, private *http.Server
	cut             context.CancelFunc // cancels all requests
	broken          chan error
	closers         []func()
}

func (s *service) onClose(f func()) { s.closers = append(s.closers, f) }

// close runs the closers, the last one first.
func (s *service) close() {
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
}

// listen opens both ports before the limits are loaded: a waiting gateway already responds on /readyz, and one whose port is taken ends at
// once.
//
// Requests and responses have no time limit as a whole, since they may be streams. Headers, idle connections and waits for clients (see pace)
// have one. WriteTimeout covers what the server writes by itself; each call sets its own deadline.
func (s *service) listen() error {
	requests, cut := context.WithCancelCause(context.Background())
	s.cut = func() { cut(errDown) }
	s.broken = make(chan error, 2)
	errorLog := slog.NewLogLogger(s.log.Handler(), slog.LevelWarn)
	serve := func(name, addr string, server *http.Server, connections int) (*http.Server, error) {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, s.config.bad(name, fmt.Sprintf("%q", addr), "an address that can be listened on: "+err.Error())
		}
		if connections > 0 {
			bounded := newConnections(l, connections)
			server.ConnState, server.ConnContext, server.Handler = bounded.note, bounded.context, bounded.handler(server.Handler)
			bounded.Listener = httplimit.WatchClients(server, l) // within: it adds to ConnState and ConnContext
			l = bounded
		} else {
			l = httplimit.WatchClients(server, l)
		}
		server.ErrorLog, server.BaseContext = errorLog, func(net.Listener) context.Context { return requests }
		s.onClose(func() { _ = server.Close() })
		s.log.Info("listening", "for", name, "address", l.Addr().String())
		go func() {
			if err := server.Serve(l); err != http.ErrServerClosed {
				s.broken <- err
			}
		}()
		return server, nil
	}
	s.onClose(s.cut)
	s.proxy.requests = requests
	s.onClose(s.proxy.base.CloseIdleConnections)
	if s.config.redis != nil {
		s.admin.pulse = newPulse(s.config.probed())
	}
	var err error
	if s.config.options.admin != "" {
		if s.private, err = serve("admin", s.config.options.admin, s.config.adminServer(s.admin), 0); err != nil {
			return err
		}
	}
	public := s.config.server(s.proxy)
	public.WriteTimeout = s.config.responseTimeout
	s.public, err = serve("listen", s.config.listen, public, s.config.maxConnections)
	return err
}

// server returns a server with the limits of all requests. It passes OPTIONS * to the handler, too.
func (c *config) server(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: c.headerTimeout, IdleTimeout: c.idleTimeout, MaxHeaderBytes: c.maxHeaderBytes,
		DisableGeneralOptionsHandler: true,
	}
}

// adminServer returns the server of the admin port.
func (c *config) adminServer(a *admin) *http.Server {
	server := c.server(a.handler())
	server.WriteTimeout = answerTime
	return server
}

// start loads the limits and opens the proxy.
func (s *service) start(ctx context.Context) error {
	c := s.config
	var client redis.UniversalClient
	if c.redis != nil {
		client = c.redis.open()
		beating, stop := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); s.admin.pulse.run(beating, client) }()
		s.onClose(func() { stop(); _ = client.Close(); <-done })
	}
	ctx, stop := context.WithTimeout(ctx, c.wait)
	defer stop()
	source, db, err := s.openLimits(ctx)
	if err != nil {
		return fmt.Errorf("--limits %s: %w", hideDSN(c.limits), err)
	}
	if s.editor, err = s.newEditor(db); err != nil {
		return fmt.Errorf("--limits %s: the audit table: %w", hideDSN(c.limits), err)
	}
	opts := []registry.Option{
		registry.WithInterval(c.interval), registry.WithLoadTimeout(c.loadTimeout), registry.WithUnknown(c.unknown), registry.WithBadRows(c.badRows), registry.WithLogger(s.log), registry.WithWait(ctx),
		registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(c.storeTimeout), tokenbucket.WithFailurePolicy(c.policy)),
	}
	opts = append(opts, c.registryOptions()...)
	opts = append(opts, c.backends(client)...)
	lossOptions, err := c.lossOptions(client)
	if err != nil {
		return err
	}
	opts = append(opts, lossOptions...)
	sw, err := s.newSwitch(client, db)
	if err != nil {
		return fmt.Errorf("--switch %s: %w", c.options.switchAt, err)
	}
	if sw != nil {
		s.onClose(sw.Close)
		s.admin.sw.Store(sw)
		if client == nil {
			opts = append(opts, registry.WithSwitch(sw))
		} else {
			opts = append(opts, registry.WithSwitch(&namedSwitch{Switch: sw, events: fleet.NewReader(client, fleet.WithKeyPrefix(c.keyPrefix)).Events}))
		}
	}
	limits, err := registry.New(source, c.newStore(client), append(opts, s.counted()...)...)
	if err != nil {
		return fmt.Errorf("--limits %s: %w", hideDSN(c.limits), err)
	}
	s.onClose(limits.Close)
	s.proxy.metrics.limits.Store(limits)
	if err := s.startPublisher(client, limits); err != nil {
		return err
	}
	if err := s.openConsole(client, limits); err != nil {
		return err
	}
	return s.proxy.open(limits)
}

// connect opens the database. To create tables the database must be reachable, so connect retries until ctx ends.
func (s *service) connect(ctx context.Context) (*sql.DB, error) {
	var cause error // the last error that is not due to the end of ctx
	for logged := false; ; logged = true {
		db, err := s.config.database.connect(ctx, s.config.switchAt == "sql")
		if err == nil || s.config.database.file != "" {
			return db, err
		}
		end, _ := ctx.Deadline()
		if cause == nil || ctx.Err() == nil && time.Now().Before(end) {
			cause = err
		}
		if ctx.Err() != nil {
			return nil, cause
		}
		if !logged {
			s.log.Error("the database cannot be used yet; the gateway retries for at most --wait", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil, cause
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (s *service) newSwitch(client redis.UniversalClient, db *sql.DB) (*killswitch.Switch, error) {
	hook := killswitch.WithHook(func(error) {}) // tell logs that it cannot be read
	switch s.config.switchAt {
	case "":
		return nil, nil
	case "sql":
		return sqlsource.NewSwitch(db, s.config.database.dialect, sqlsource.WithPolling(hook))
	}
	return killswitch.NewRedis(client, s.config.switchAt[len("redis:"):], hook)
}

// lastWords is how long calls that are cut off may take to answer their clients.
const lastWords = time.Second

var errDown = errors.New("the server is going down")

// drain shuts down gracefully: /readyz responds 503, then no new calls are accepted, and calls in flight may end.
func (s *service) drain() error {
	s.admin.draining.Store(true)
	settings := s.proxy.live.Load()
	s.log.Info("draining", "inFlight", s.proxy.calls.inFlight.Load(), "delay", settings.drainDelay, "atMost", settings.drain)
	time.Sleep(settings.drainDelay)
	ctx, stop := context.WithTimeout(context.Background(), settings.drain)
	defer stop()
	err := s.public.Shutdown(ctx)
	if err == nil { // Shutdown does not wait for upgraded connections, which are calls in flight
		ended := make(chan struct{})
		go func() { s.proxy.running.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		left := s.proxy.calls.inFlight.Load()
		s.log.Warn("the drain period is over, so calls in flight are cut off", "cutOff", left)
		s.cut()
		ctx, stop := context.WithTimeout(context.Background(), lastWords)
		defer stop()
		_ = s.public.Shutdown(ctx) // calls that wait are answered
		_ = s.public.Close()
		return fmt.Errorf("%w: %d calls after %v", ErrCutOff, left, settings.drain)
	}
	s.log.Info("the gateway has stopped")
	return nil
}
