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

// Config configures a Console. Only Source is required.
type Config struct {
	Source Source
	// Rows returns the limits that should be in force; may be nil. Those that no instance reports are shown, too.
	Rows func() []registry.Limit
	// Here returns what the process that serves the console knows about itself; may be nil. The pages show that, too, since an
	// instance cannot publish while Redis is full or away. It is called once per beat, and for each page while the Source fails.
	Here func() Here
	// Editor changes rows. If nil, the pages cannot change any.
	Editor Editor
	// Penalize holds a bucket back, Reset drops its state, and Turn turns the switch, for the whole fleet. The pages do not
	// offer a function that is nil. The console records the first two in the Editor's audit; Turn must record itself
	// (editor.Editor.SetSwitch, or Act). Turn returns ErrNotAudited if it turned the switch and could not record it.
	Penalize func(ctx context.Context, name string, d time.Duration) error
	Reset    func(ctx context.Context, name string) error
	Turn     func(ctx context.Context, on bool, who, why string) error
	// Confirm accepts that the tables have lost more than half of their limits, for the whole fleet (registry.Confirmations).
	// If nil, the pages do not offer it.
	Confirm func(ctx context.Context, who, why string) error
	// Announce adds a person's actions, except changes of rows, to the fleet's events (fleet.Announce). If nil, only the log
	// has them.
	Announce func(ctx context.Context, e fleet.Event) error
	Access   Access
	// Beat is the interval at which the Source is read while there are viewers: 100 ms to 1 minute; 2 s if 0.
	Beat time.Duration
	// MaxStreams bounds the streams open at once; 2000 if 0.
	MaxStreams int
	// StreamTime is how long a stream lasts before the browser must reconnect; 10 minutes if 0.
	StreamTime time.Duration
	// Log records changes and failed sign-ins; slog.Default() if nil.
	Log *slog.Logger
}

// Here is what a process knows about itself.
type Here struct {
	// Problems in words, one a line.
	Problems []string
	// Switch as the process has read it; nil if it has none.
	Switch *fleet.Switch
}

// problems returns the problems of the process itself.
func (h *Here) problems() (all []problem) {
	for _, text := range h.Problems {
		all = append(all, problem{Text: "This instance: " + text})
	}
	return all
}

// Console is an http.Handler; New makes one. All methods may be called concurrently.
type Console struct {
	config  Config
	auth    *authenticator
	mux     *http.ServeMux
	board   *board
	streams atomic.Int64
	closed  chan struct{}
	close   func()

	signIns       *failedSignIns
	refusedWrites lineLimit
	bucketReads   readBudget

	mu    sync.Mutex
	feeds map[string]*feed // with viewers, except the board's
}

// ErrInvalid is returned by New if a field of Config is out of range.
var ErrInvalid = errors.New("console: invalid configuration")

// ErrNotAudited is returned by Config.Turn if the switch was turned and the audit could not be written, so that only the log
// has it.
var ErrNotAudited = errors.New("console: not in the audit table")

// New returns a Console. Call Close when it is no longer used.
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
	auth, err := newAuthenticator(config.Access)
	if err != nil {
		return nil, err
	}
	signIns := newFailedSignIns(&config.Access)
	if signIns.client == nil {
		return nil, bad("Access", "Proxies or Forwarders", "valid networks")
	}
	c := &Console{config: config, auth: auth, closed: make(chan struct{}), feeds: map[string]*feed{}, signIns: signIns}
	c.close = sync.OnceFunc(func() { close(c.closed) })
	c.board = newBoard(config.Source, config.Rows, config.Beat)
	if config.Here != nil {
		c.board.here = config.Here
	}
	c.routes()
	return c, nil
}

// Close ends all streams and stops reading the Source.
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

// feedOf returns the feed of that name. It starts with its first viewer and ends with its last.
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

// principalKey is the key of a request's principal in its context.
type principalKey struct{}

func principalOf(r *http.Request) principal {
	c, _ := r.Context().Value(principalKey{}).(principal)
	return c
}

// ServeHTTP implements http.Handler.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	protect(w.Header())
	user, err := c.auth.identify(r)
	if err != nil {
		if unknown := new(signInError); errors.As(err, &unknown) {
			c.logFailedSignIn(r, unknown)
		}
		c.refuse(w, r, err)
		return
	}
	if r.URL.Path == "" { // http.StripPrefix leaves an empty path if the prefix has no slash at its end
		asked, _, _ := strings.Cut(r.RequestURI, "?")
		w.Header().Set("Location", "./"+path.Base(asked)+"/")
		w.WriteHeader(http.StatusMovedPermanently)
		return
	}
	c.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), principalKey{}, user)))
}

// protect sets the headers that keep names in a page from running as scripts, and other sites from framing it.
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
