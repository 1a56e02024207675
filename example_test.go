package tokenbucket_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
)

// This is all that an instance of a gateway needs. All instances together keep to five calls a second.
func Example() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	store := tokenbucket.NewRedisScriptStore(client)
	limiter, err := tokenbucket.NewSmoothBursty("/ibe/AvailFare", 5, tokenbucket.WithStore(store))
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}

	http.HandleFunc("/fares", func(w http.ResponseWriter, r *http.Request) {
		ok, err := limiter.TryAcquire(r.Context(), 1, 500*time.Millisecond)
		switch {
		case err != nil: // Redis is away, or the client has gone: your decision
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		case !ok: // no permit within half a second
			http.Error(w, "try again later", http.StatusTooManyRequests)
		default:
			fmt.Fprintln(w, "call the upstream here")
		}
	})
}

// Redis behind TLS, with a user of its own.
func ExampleNewRedisScriptStore_tls() {
	var authority, certificate, key []byte // PEM, as from files
	var password string

	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		panic("no certificate in it")
	}
	own, err := tls.X509KeyPair(certificate, key) // only if the server asks for one (tls-auth-clients yes)
	if err != nil {
		panic(err)
	}
	client := redis.NewClient(&redis.Options{
		Addr:     "redis.example:6380",
		Username: "script",
		Password: password,
		TLSConfig: &tls.Config{
			ServerName:   "redis.example",
			RootCAs:      roots,
			Certificates: []tls.Certificate{own},
			MinVersion:   tls.VersionTLS12,
		},
	})
	store := tokenbucket.NewRedisScriptStore(client)
	_, _ = tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store))
}

// A limit so high that even a shared round trip a call is too much.
func ExampleWithPrefetch() {
	store := tokenbucket.NewRedisScriptStore(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	limiter, err := tokenbucket.NewSmoothBursty("cache", 50_000, tokenbucket.WithStore(store), tokenbucket.WithPrefetch(20*time.Millisecond))
	if err != nil {
		panic(err)
	}
	defer limiter.Close(context.Background()) // gives back the unused permits

	_, _ = limiter.TryAcquire(context.Background(), 1, 0)
}

// A thousand searches a second keep a bucket busy that bookings use as well. Searches have the lowest priority, so a booking waits for few of
// them.
func ExampleRateLimiter_ForPriority() {
	bookings, err := tokenbucket.NewSmoothBursty("upstream", 20, tokenbucket.WithClock(clockwork.NewFakeClock()))
	if err != nil {
		panic(err)
	}
	searches := bookings.ForPriority(tokenbucket.Lowest)

	ctx, granted := context.Background(), 0
	for range 1000 {
		search, err := searches.TryReserve(ctx, 1, 500*time.Millisecond)
		if err == nil && search.OK() {
			granted++
		}
	}
	booking, err := bookings.TryReserve(ctx, 1, 500*time.Millisecond)
	if err != nil {
		panic(err)
	}
	fmt.Println(granted, "searches; the booking after them is due in", booking.Delay())
	// Output: 3 searches; the booking after them is due in 150ms
}

// A limiter for batch jobs, beside those of the same name that serve users. With a floor of 0 it gets only what they leave.
func ExampleWithPriority() {
	limiter, err := tokenbucket.NewSmoothBursty("upstream", 20, tokenbucket.WithPriority(tokenbucket.Lowest), tokenbucket.WithPriorityFloor(0))
	if err != nil {
		panic(err)
	}
	fmt.Println(limiter.Priority())
	// Output: lowest
}

// A handler whose callers name their priority.
func ExampleParsePriority() {
	limiter, err := tokenbucket.NewSmoothBursty("upstream", 20)
	if err != nil {
		panic(err)
	}
	http.HandleFunc("/fares", func(w http.ResponseWriter, r *http.Request) {
		priority, err := tokenbucket.ParsePriority(r.Header.Get("X-Priority")) // of trusted callers only
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if ok, err := limiter.ForPriority(priority).Try(r.Context()); !ok || err != nil {
			http.Error(w, "try again later", http.StatusTooManyRequests)
		}
	})
	_, err = tokenbucket.ParsePriority("urgent")
	fmt.Println(err)
	// Output: tokenbucket: invalid configuration: priority "urgent": want normal, low or lowest
}

func ExampleRateLimiter_TryAcquire() {
	ctx := context.Background()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithInitialPermits(5))
	if err != nil {
		panic(err)
	}
	passed := 0
	for range 10 {
		if ok, _ := limiter.TryAcquire(ctx, 1, 0); ok {
			passed++
		}
	}
	fmt.Println(passed, "of 10 passed at once")

	_, err = limiter.TryAcquire(ctx, 8, 500*time.Millisecond)
	fmt.Println(errors.Is(err, tokenbucket.ErrNeverGranted), err)
	// Output:
	// 5 of 10 passed at once
	// true tokenbucket: can never be granted: bucket "fares": permits 8: want a timeout of at least 600ms
}

func ExampleRateLimiter_Reserve() {
	ctx := context.Background()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 1000)
	if err != nil {
		panic(err)
	}
	reservation, err := limiter.Reserve(ctx, 10)
	if err != nil {
		panic(err)
	}
	select {
	case <-reservation.Ready():
		fmt.Println("ten permits are due")
	case <-time.After(time.Minute):
		_ = reservation.Cancel(ctx) // the waiters behind it move up
	}
	// Output: ten permits are due
}

// The cost of a call to a language model is known after the reply: it reserves an estimate and settles the difference.
func ExampleReservation_Settle() {
	ctx := context.Background()
	tokens, err := tokenbucket.NewSmoothBursty("model", 60_000.0/60, tokenbucket.WithMaxPermits(60_000), tokenbucket.WithInitialPermits(60_000),
		tokenbucket.WithClock(clockwork.NewFakeClock())) // stands still, so that the figure below is exact
	if err != nil {
		panic(err)
	}
	defer func() { _ = tokens.Close(ctx) }() // waits for SettleLater

	reservation, err := tokens.Reserve(ctx, 4_000)
	if err != nil {
		panic(err)
	}
	<-reservation.Ready()
	used := 1_250                                         // as the reply says
	if err := reservation.Settle(ctx, used); err != nil { // or SettleLater(used)
		panic(err)
	}
	bucket, _ := tokens.State(ctx)
	fmt.Println(60_000-bucket.StoredPermits, "tokens were charged")
	// Output: 1250 tokens were charged
}

func ExampleNewQuota() {
	limiter, err := tokenbucket.NewQuota("fares", 5, time.Second, 2*time.Millisecond)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%.3f/s, never more than 5 in any second\n", limiter.Rate())
	// Output: 4.990/s, never more than 5 in any second
}

func ExampleNewSmoothWarmingUp() {
	ctx := context.Background()
	limiter, err := tokenbucket.NewSmoothWarmingUp("booking", 5, 4*time.Second, tokenbucket.WithClock(clockwork.NewFakeClock()))
	if err != nil {
		panic(err)
	}
	for range 3 { // cold: the first passes at once, then 580 and 540 ms instead of 200
		r, _ := limiter.Reserve(ctx, 1)
		fmt.Println(r.Delay())
	}
	// Output:
	// 0s
	// 580ms
	// 1.12s
}

func ExampleRateLimiter_SetRate() {
	ctx := context.Background()
	store := tokenbucket.NewMemoryStore()
	one, _ := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store))
	other, _ := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store))
	if err := one.SetRate(ctx, 10); err != nil {
		panic(err)
	}
	_, _ = other.Try(ctx) // its next answer brings the news
	fmt.Println(other.Rate())
	// Output: 10
}

// Rate and burst of the whole fleet, each set by itself: SetRate alone would make this a burst of 10,000.
func ExampleRateLimiter_SetRateAndBurst() {
	ctx := context.Background()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 0.01, tokenbucket.WithMaxPermits(1))
	if err != nil {
		panic(err)
	}
	if err := limiter.SetRateAndBurst(ctx, 100, 1); err != nil {
		panic(err)
	}
	bucket, _ := limiter.State(ctx)
	fmt.Println(limiter.Rate(), bucket.MaxPermits)
	// Output: 100 1
}

func ExampleWithFailurePolicy() {
	ctx := context.Background()
	away := redis.NewClient(&redis.Options{Addr: "localhost:1", DialerRetries: 1}) // no server listens there
	defer func() { _ = away.Close() }()
	store := tokenbucket.NewRedisScriptStore(away)

	limiter, err := tokenbucket.NewSmoothBursty("fares", 100, tokenbucket.WithStore(store),
		tokenbucket.WithFailurePolicy(tokenbucket.LocalShare(4)), // a quarter of the rate, unless the fleet has counted itself
		tokenbucket.WithLogger(slog.New(slog.DiscardHandler)),    // the observer reports enough
		tokenbucket.WithObserver(tokenbucket.Observer{
			Decision: func(_ context.Context, d tokenbucket.Decision) { fmt.Println("decided by", d.By) },
		}))
	if err != nil {
		panic(err)
	}
	waited, err := limiter.Acquire(ctx, 1)
	if err != nil {
		panic(err)
	}
	fmt.Println("waited", waited.Round(10*time.Millisecond))
	// Output:
	// decided by policy
	// waited 40ms
}

func ExampleWithShadow() {
	ctx := context.Background()
	refused := 0
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithShadow(),
		tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) {
			if !d.Granted {
				refused++
			}
		}}))
	if err != nil {
		panic(err)
	}
	passed := 0
	for range 10 {
		if ok, _ := limiter.TryAcquire(ctx, 1, 500*time.Millisecond); ok {
			passed++
		}
	}
	fmt.Println(passed, "passed;", refused, "would have been refused")
	// Output: 10 passed; 7 would have been refused
}

// A client of Redis with the settings that docs/redis-client.md recommends. Nothing is sent before the first call.
func ExampleNewRedisScriptStore() {
	client := redis.NewClient(&redis.Options{
		Addr:                  "localhost:6379",
		DialTimeout:           time.Second,
		ReadTimeout:           2 * time.Second, // longer than the store timeout
		WriteTimeout:          2 * time.Second,
		DialerRetries:         1, // a refused connection fails at once
		PoolSize:              10,
		PoolTimeout:           100 * time.Millisecond,
		ContextTimeoutEnabled: true,
	})
	store := tokenbucket.NewRedisScriptStore(client)
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(time.Second))
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	defer func() { _ = client.Close() }()
	fmt.Println(limiter.Name(), limiter.Rate())
	// Output: fares 5
}

// The Go blocks of the README and of the pages in docs are parts of the examples, so they compile and do what they say.
func TestReadme(t *testing.T) {
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	source := ""
	for _, file := range []string{
		"example_test.go", "example_migrating_test.go", "example_testing_test.go", "example_fairness_test.go", "example_group_test.go", "gate/example_cost_test.go", "httplimit/example_two_keys_test.go",
		"registry/example_test.go", "semaphore/example_test.go", "slidingwindow/example_test.go",
		"examples/hello/main.go", "console/fleet/example_test.go",
	} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		source += squeeze(string(text)) + "\n"
	}
	pages, err := fs.Glob(os.DirFS("."), "docs/*.md")
	require.NoError(t, err)
	blocks := map[string]int{}
	for _, page := range append(pages, "README.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, part := range strings.Split(string(text), "```go\n")[1:] {
			code, _, _ := strings.Cut(part, "```")
			require.True(t, strings.Contains(source, squeeze(code)), "%s: no example has\n%s", page, code)
			blocks[page]++
		}
	}
	require.GreaterOrEqual(t, blocks["README.md"], 3)
	require.GreaterOrEqual(t, len(blocks), 6, "pages with Go blocks")
}

// Every link in README and in the pages leads somewhere.
func TestReadmeLinks(t *testing.T) {
	pages, err := fs.Glob(os.DirFS("."), "docs/*.md")
	require.NoError(t, err)
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	links := 0
	for _, page := range append(pages, "README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, heading, _ := strings.Cut(m[1], "#")
			target := page
			if file != "" {
				target = path.Join(path.Dir(page), file)
			}
			_, err := os.Stat(target)
			require.NoError(t, err, "%s: link to %s", page, m[1])
			if heading != "" {
				require.Contains(t, headings(t, target), heading, "%s: link to %s", page, m[1])
			}
			links++
		}
	}
	require.Greater(t, links, 50)
}

// headings are the anchors of a page: in lower case, without punctuation, with hyphens for spaces.
func headings(t *testing.T, page string) []string {
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	var all []string
	for line := range strings.Lines(string(text)) {
		if name, found := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); found && line[0] == '#' {
			keep := func(r rune) rune {
				switch {
				case r == ' ':
					return '-'
				case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
					return unicode.ToLower(r)
				}
				return -1
			}
			all = append(all, strings.Map(keep, strings.TrimSpace(name)))
		}
	}
	return all
}
