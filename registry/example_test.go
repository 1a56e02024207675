package registry_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/redis/go-redis/v9"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Limits by name, from a fixed list; package sqlsource reads them from a table.
func ExampleNew() {
	limits, err := registry.New(registry.Static{
		{Name: "/ibe/AvailFare", Rate: 5, MaxWait: 500 * time.Millisecond},
		{Name: "/ibe/Ticket", Rate: 1, Quota: true},
		{Name: "/ibe/Ping", Disabled: true},
	}, tokenbucket.NewMemoryStore(), registry.WithUnknown(registry.Refuse()))
	if err != nil {
		panic(err)
	}
	defer limits.Close()
	for _, name := range []string{"/ibe/AvailFare", "/ibe/Ticket", "/ibe/Ticket", "/ibe/Ping", "/ibe/Other"} {
		a, err := limits.Enter(context.Background(), name)
		if err != nil {
			panic(err)
		}
		fmt.Println(name, a.OK, a.By)
		a.Leave() // when the call has ended
	}
	// Output:
	// /ibe/AvailFare true limit
	// /ibe/Ticket true limit
	// /ibe/Ticket false limit
	// /ibe/Ping true disabled
	// /ibe/Other false unknown
}

// A row with a rate, a window and a concurrency: all must agree, and the call gives its place back when it has ended.
func ExampleRegistry_Enter() {
	source := registry.Static{{Name: "/ibe/Order", Rate: 5, MaxWait: 500 * time.Millisecond, Window: 24 * time.Hour, WindowLimit: 10_000, Concurrent: 1}}
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores())
	if err != nil {
		panic(err)
	}
	defer limits.Close()
	order := func(ctx context.Context, call func()) {
		a, err := limits.Enter(ctx, "/ibe/Order")
		if err != nil {
			panic(err)
		}
		if !a.OK {
			fmt.Println("refused by", a.By, a.RetryAfter)
			return
		}
		defer a.Leave()
		call()
	}
	order(context.Background(), func() {
		order(context.Background(), func() {})
	})
	// Output: refused by concurrency 1s
}

// A gateway whose limits operators keep in a table: calls to the upstream wait for a permit of the row that their path names.
func Example_gateway() {
	db, err := sql.Open("mysql", "gateway:secret@tcp(db:3306)/limits") // import the driver that you use
	if err != nil {
		panic(err)
	}
	source, err := sqlsource.New(db, sqlsource.MySQL)
	if err != nil {
		panic(err)
	}
	store := tokenbucket.NewRedisScriptStore(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	limits, err := registry.New(source, store, registry.WithInterval(5*time.Second))
	if err != nil {
		panic(err) // the table cannot be read; WithWait waits for it
	}
	defer limits.Close()
	transport, err := httplimit.NewTransport(limits)
	if err != nil {
		panic(err)
	}
	upstream := &http.Client{Transport: transport}
	_, err = upstream.Post("http://ibe.example/ibe/AvailFare", "application/json", nil)
	if errors.Is(err, httplimit.ErrRefused) {
		fmt.Println("no permit in time")
	}
}

// A row whose calls cost tokens: 100,000 in any minute, and at most two calls at once, for which a call waits up to a minute.
func ExampleRegistry_EnterN() {
	source := registry.Static{{
		Name: "/v1/chat", NoRate: true, Window: time.Minute, WindowLimit: 100_000, Concurrent: 2, ConcurrentWait: time.Minute,
	}}
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores())
	if err != nil {
		panic(err)
	}
	defer limits.Close()
	for _, tokens := range []int{80_000, 30_000, 15_000, 200_000} {
		a, err := limits.EnterN(context.Background(), "/v1/chat", tokens)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(tokens, a.OK, a.By)
		a.Leave()
	}
	// Output:
	// 80000 true window
	// 30000 false window
	// 15000 true window
	// gate: tokenbucket: can never be granted: key "/v1/chat": cost 200000: want 1 to the limit of the window, 100000
}
