package redistest

import "go.uber.org/goleak"

// Dialing has goleak overlook what go-redis leaves for a second after a client was closed whose server was away: a goroutine
// that still tries to reach it.
var Dialing = goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial")
