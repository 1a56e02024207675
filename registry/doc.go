// Package registry keeps the limiters of a gateway: one for each row of a table that operators change while the gateway
// runs.
//
//	source, err := sqlsource.New(db, sqlsource.MySQL)
//	limits, err := registry.New(source, tokenbucket.NewRedisScriptStore(client), registry.WithInterval(5*time.Second))
//	ok, err := limits.Allow(ctx, "/ibe/AvailFare")
//
// Which call to use:
//
//	                  what                               waits      rows with a window   with a concurrency
//	Registry.Enter    Admission; Leave when the call     yes        yes                  yes
//	                  has ended
//	Registry.Allow    true or false                      yes        yes                  ErrNeedsEnter
//	Registry.Begin    Enter for those who wait for the   no (¹)     yes                  yes
//	                  rate by themselves
//	Registry.Reserve  Begin for rows with a rate only    no         ErrNeedsEnter        ErrNeedsEnter
//	Registry.Admit    Begin for httplimit and grpclimit  no (¹)     yes                  yes
//
// Enter is right for every row, and Allow is the short form where no row has a concurrency. HTTP and gRPC take the Registry as it is:
// httplimit.NewTransport, httplimit.NewMiddleware and contrib/grpc call what they need.
//
// (¹) for a row that names nothing but a rate. With a window or a concurrency they wait as Enter does: what is counted must be counted
// just before the call begins.
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
