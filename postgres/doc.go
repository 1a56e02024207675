// Package postgres keeps the shared state of a fleet in PostgreSQL: semaphores, whose permits are leases by the database's clock. It is a
// module of its own, so that only programs that use PostgreSQL depend on its driver.
//
// Everything is in a schema of its own, which Migrate creates and updates:
//
//	if err := postgres.Migrate(ctx, pool); err != nil { … }
//	s, err := postgres.NewSemaphore(pool, "fares", 5)
package postgres
