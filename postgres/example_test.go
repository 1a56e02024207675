package postgres_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-tokenbucket/tokenbucket/postgres"
)

// Five calls at once to an upstream, all instances of a gateway together.
func ExampleNewSemaphore() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	if err := postgres.Migrate(ctx, pool); err != nil { // at each start, or once by hand
		panic(err)
	}
	fares, err := postgres.NewSemaphore(pool, "fares", 5)
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	defer func() { _ = fares.Close(ctx) }()

	err = fares.Do(ctx, func(ctx context.Context) error { // ctx ends if the permit is lost
		fmt.Println("call the upstream here")
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
}

// Several semaphores of one store share a connection to listen on.
func ExampleStore_Semaphore() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	store, err := postgres.New(pool, postgres.WithSchema("limits"))
	if err != nil {
		panic(err)
	}
	for _, upstream := range []string{"fares", "seats"} {
		s, err := store.Semaphore(upstream, 5)
		if err != nil {
			panic(err)
		}
		defer func() { _ = s.Close(ctx) }()
	}
}
