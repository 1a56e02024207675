// Command httpserver is an example of an HTTP server that limits the calls of each URL path in any window of time.
//
//	go run ./examples/httpserver --limit 3 --window 10s
//	for i in 1 2 3 4; do curl -i http://127.0.0.1:8080/hello; done
//
// The fourth call is answered with 429 and Retry-After; other paths have limits of their own. With --redis, start several: they count calls
// together.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

type options struct {
	listen             string
	redis              string
	limit, paths       int
	window, resolution time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.listen, "listen", "127.0.0.1:8080", "address to serve on")
	flag.StringVar(&o.redis, "redis", "", "`host:port` of a Redis to count in (default: this process counts alone)")
	flag.IntVar(&o.limit, "limit", 5, "calls of one path in any window")
	flag.DurationVar(&o.window, "window", 10*time.Second, "the window")
	flag.DurationVar(&o.resolution, "resolution", 0, "a sub-interval (default a tenth of the window)")
	flag.IntVar(&o.paths, "paths", 10_000, "paths to keep limiters of")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "httpserver:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends.
func run(ctx context.Context, o options, out io.Writer) error {
	if o.resolution == 0 {
		o.resolution = o.window / 10
	}
	opts := []slidingwindow.Option{slidingwindow.WithObserver(slidingwindow.Observer{Health: func(h slidingwindow.Health) {
		if h.Down {
			slog.Warn("httpserver: Redis is unavailable, using the local share", "error", h.Err)
		} else {
			slog.Info("httpserver: Redis is available again", "after", h.After)
		}
	}})}
	if o.redis != "" {
		client := redis.NewClient(&redis.Options{Addr: o.redis})
		defer func() { _ = client.Close() }()
		// During an outage of Redis, this process uses a third of the limit, since there are about three processes.
		opts = append(opts, slidingwindow.WithRedis(client), slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(max(1, o.limit/3))))
	}
	limits, err := newLimits(o.paths, o.window+o.resolution, func(path string) (*slidingwindow.Limiter, error) {
		return slidingwindow.New(path, o.limit, o.window, o.resolution, opts...)
	})
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: limited(limits, http.HandlerFunc(hello))}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	fmt.Fprintf(out, "Each path %d times in any %v. Try:\n\n  for i in $(seq %d); do curl -i http://%s/hello; done\n\n",
		o.limit, o.window, o.limit+1, listener.Addr())
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(drain)
}

func hello(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello from %s\n", r.URL.Path) }

// limited returns a handler that passes a call to next if the limit of its path grants it.
func limited(limits *limits, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limiter := limits.of(r.URL.Path)
		switch ok, err := limiter.Allow(r.Context()); {
		case errors.Is(err, context.Canceled): // the client has disconnected
		case err != nil:
			slog.Warn("the limiter failed, so the call was answered with 503", "path", r.URL.Path, "error", err)
			http.Error(w, http.StatusText(http.StatusServiceUnavailable), http.StatusServiceUnavailable)
		case !ok:
			seconds := (limiter.RetryAfter(1) + time.Second - 1) / time.Second
			w.Header().Set("Retry-After", strconv.Itoa(max(1, int(seconds))))
			http.Error(w, http.StatusText(http.StatusTooManyRequests), http.StatusTooManyRequests)
		default:
			next.ServeHTTP(w, r)
		}
	})
}
