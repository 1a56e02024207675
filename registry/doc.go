// Package registry keeps the limiters of a gateway: one for each row of a table that operators change while the gateway
// runs.
//
//	source, err := sqlsource.New(db, sqlsource.MySQL)
//	limits, err := registry.New(source, tokenbucket.NewRedisScriptStore(client), registry.WithInterval(5*time.Second))
//	a, err := limits.Enter(ctx, "/ibe/AvailFare") // waits until the call may begin
//	…
//	defer a.Leave()
//
// [Registry.Enter] is the call for every row, whether it has a rate, a window, a concurrency or several of them. A Registry is a gate.Gate,
// so httplimit.NewTransport, httplimit.NewMiddleware and contrib/grpc accept it.
//
// A [Source] loads the table of limits. Every process of a fleet loads it by itself, at every interval, and puts changed rows in force.
// Shared buckets follow the newest version, so a process that has not loaded yet gets a new rate with the next reply of the store. The
// version of a row is the time of its last modification. A changed row gets a higher version even if that time has not risen: two changes may
// fall into one second of a coarse clock, and a clock that is set back repeats an hour.
//
// The table has precedence. If the configuration of a bucket differs from its row, for instance after tokenbucket.RateLimiter.SetRate, the
// row is put in force again after two loads. If a load fails, or a row turns bad, the earlier limits stay in force. Calls of a name whose row
// never was valid are refused ([WithBadRows]), and so are calls of a row with a rate of 0. All of this is logged, again every minute, and
// each load is passed to the hook ([WithHook]).
package registry
