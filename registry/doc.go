// Package registry keeps the limiters of a gateway: one for each row of a table that operators change while the gateway
// runs.
//
//	source, err := sqlsource.New(db, sqlsource.MySQL)
//	limits, err := registry.New(source, tokenbucket.NewRedisScriptStore(client), registry.WithInterval(5*time.Second))
//	a, err := limits.Enter(ctx, "/ibe/AvailFare") // waits until the call may begin
//	…
//	defer a.Leave()
//
// [Registry.Enter] is the one call for every row, whatever it names: a rate, a window, a concurrency. A Registry is a gate.Gate, so
// httplimit.NewTransport, httplimit.NewMiddleware and contrib/grpc take it as it is.
//
// A Source says what the limits are. Every instance of a fleet asks it by itself, every interval, and puts in force what has
// changed; the shared buckets follow the newest version, so an instance that has not asked yet learns a new rate with its next
// answer. A row's version is the time of its last modification, but a changed content is put in force whatever that says: a
// time of whole seconds does not tell two changes in one second apart, and a clock set back repeats an hour.
//
// The table decides: where a bucket follows something else than its row (tokenbucket.RateLimiter.SetRate, say), the row
// wins after two loads. A source that is away, and a row that turns bad, leave in force what was there before. A name whose row
// never was good is refused ([WithBadRows]), and so is one with a rate of 0. All of that is told to the log, again every minute, and
// to the hook, each time.
package registry
