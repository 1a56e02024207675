package console

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Config is what a Console needs. Only Source must be there.
type Config struct {
	Source Source
	// Rows are the limits as they should be in force: those that no instance has told of are shown, too. Nil: none.
	Rows func() []registry.Limit
	// Editor changes rows; nil: none can be changed.
	Editor Editor
	// Penalize holds a bucket back, Reset forgets its state, and Turn turns the switch, for the whole fleet. Nil: the pages do not
	// offer it. The Editor's audit is told of the first two; Turn sees to that itself (editor.Editor.SetSwitch, or Act). Its error is an
	// ErrNotAudited if the switch was turned all the same.
	Penalize func(ctx context.Context, name string, d time.Duration) error
	Reset    func(ctx context.Context, name string) error
	Turn     func(ctx context.Context, on bool, who, why string) error
	// Confirm accepts that tables have lost more than half of their limits, for the whole fleet (registry.Confirmations). Nil: the pages do
	// not offer it.
	Confirm func(ctx context.Context, who, why string) error
	// Announce adds what a person has done, besides changing rows, to the events of the fleet (fleet.Announce). Nil: it is in the log alone.
	Announce func(ctx context.Context, e fleet.Event) error
	Access   Access
	// Beat is how often the Source is asked while somebody looks: 100 ms to 1 minute, 0: 2 s.
	Beat time.Duration
	// MaxStreams is how many may look at once: 0: 2000.
	MaxStreams int
	// StreamTime is when a stream ends, and the browser asks anew: 0: 10 minutes.
	StreamTime time.Duration
	// Log is told of changes, and of sign-ins that fail; nil: slog.Default().
	Log *slog.Logger
}

// Console is an http.Handler: see New. All methods may be called by many goroutines at once.
type Console struct {
	config  Config
	gate    *gate
	mux     *http.ServeMux
	board   *board
	streams atomic.Int64
	closed  chan struct{}
	close   func()

	strangers *strangers

	mu    sync.Mutex
	feeds map[string]*feed // that somebody looks at, besides the board's
}

// ErrInvalid: a field of Config is out of range.
var ErrInvalid = errors.New("console: invalid configuration")

// ErrNotAudited: the switch was turned, and only the log says so: the audit could not be written.
var ErrNotAudited = errors.New("console: not in the audit table")

// New makes a console. Close it when it is no longer used.
func New(config Config) (*Console, error) {
	bad := func(field string, value any, want string) error {
		return fmt.Errorf("%w: %s %v: want %s", ErrInvalid, field, value, want)
	}
	if config.Source == nil {
		return nil, bad("Source", "nil", "a source")
	}
	if config.Beat == 0 {
		config.Beat = 2 * time.Second
	}
	if config.MaxStreams == 0 {
		config.MaxStreams = 2000
	}
	if config.StreamTime == 0 {
		config.StreamTime = 10 * time.Minute
	}
	if config.Log == nil {
		config.Log = slog.Default()
	}
	switch {
	case config.Beat < 100*time.Millisecond || config.Beat > time.Minute:
		return nil, bad("Beat", config.Beat, "100ms to 1m")
	case config.MaxStreams < 0:
		return nil, bad("MaxStreams", config.MaxStreams, "at least 1, or 0")
	case config.StreamTime < 0:
		return nil, bad("StreamTime", config.StreamTime, "a duration, or 0")
	}
	gate, err := newGate(config.Access)
	if err != nil {
		return nil, err
	}
	strangers := newStrangers(&config.Access)
	if strangers.client == nil {
		return nil, bad("Access", "Proxies or Forwarders", "valid networks")
	}
	c := &Console{config: config, gate: gate, closed: make(chan struct{}), feeds: map[string]*feed{}, strangers: strangers}
	c.close = sync.OnceFunc(func() { close(c.closed) })
	c.board = newBoard(config.Source, config.Rows, config.Beat)
	c.routes()
	return c, nil
}

// Close ends all streams, and the reading.
func (c *Console) Close() {
	c.close()
	c.board.feed.close()
	c.mu.Lock()
	feeds := c.feeds
	c.feeds = map[string]*feed{}
	c.mu.Unlock()
	for _, f := range feeds {
		f.close()
	}
}

// feedOf is the feed of that name, made for who looks first; it ends with who looks last.
func (c *Console) feedOf(name string, read func(context.Context) []byte) *feed {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.feeds[name]; f != nil {
		return f
	}
	f := &feed{beat: c.config.Beat, read: func(ctx context.Context) ([]byte, func() []byte) {
		text := read(ctx)
		return text, func() []byte { return text }
	}}
	f.ended = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.feeds[name] == f {
			delete(c.feeds, name)
		}
	}
	c.feeds[name] = f
	return f
}

// callerKey is where a request's context has who asks.
type callerKey struct{}

func who(r *http.Request) caller {
	c, _ := r.Context().Value(callerKey{}).(caller)
	return c
}

// ServeHTTP implements http.Handler.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	protect(w.Header())
	asks, err := c.gate.who(r)
	if err != nil {
		if unknown := new(strangerError); errors.As(err, &unknown) {
			c.tellStranger(r, unknown)
		}
		c.refuse(w, r, err)
		return
	}
	if r.URL.Path == "" { // what http.StripPrefix leaves of a prefix without a slash
		asked, _, _ := strings.Cut(r.RequestURI, "?")
		w.Header().Set("Location", "./"+path.Base(asked)+"/")
		w.WriteHeader(http.StatusMovedPermanently)
		return
	}
	c.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, asks)))
}

// protect sets what keeps a page's names from becoming its scripts, and others from framing it.
func protect(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "+
		"form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}
