// Package postgres keeps in PostgreSQL what a fleet shares: semaphores, whose permits are leases by the database's clock.
// It is a module of its own, so that only who uses PostgreSQL depends on its driver.
//
// Everything is in a schema of its own, which Migrate creates and brings up to date:
//
//	if err := postgres.Migrate(ctx, pool); err != nil { … }
//	s, err := postgres.NewSemaphore(pool, "fares", 5)
package postgres
