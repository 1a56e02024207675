package main

import (
	"context"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/pflag"
)

const (
	bucketName = "/ibe/AvailFare"
	coldFactor = 3

	// Above these bounds the demo would measure the speed of its machine.
	maxRate      = 1000
	maxInstances = 100
	maxDuration  = time.Minute
)

// options are the demo's flags.
type options struct {
	rate      float64
	burst     float64
	maxWait   time.Duration
	instances int
	duration  time.Duration
	store     string
	warmup    time.Duration
	redis     string
	console   bool
	priority  bool
	consoleAt string
}

func (o *options) addFlags(f *pflag.FlagSet) {
	f.Float64Var(&o.rate, "rate", 5, "permits per second, for all gateways together")
	f.Float64Var(&o.burst, "burst", 0, "permits that an idle bucket stores (default one second's worth, at least 1)")
	o.maxWait = registry.DefaultMaxWait
	f.Var((*seconds)(&o.maxWait), "max-wait", "how long a call may wait for its permit: a duration such as 500ms, or seconds")
	f.Var((*seconds)(&o.maxWait), "cache", "the earlier name of --max-wait")
	_ = f.MarkHidden("cache") // it exists
	f.IntVar(&o.instances, "instances", 3, "number of gateways")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long calls are offered")
	f.StringVar(&o.store, "store", "script", "script: one round trip to Redis; lock: a distributed lock; memory: one process only")
	f.DurationVar(&o.warmup, "warmup", 0, "warm-up period, in which the rate rises from cold to full (default none)")
	f.StringVar(&o.redis, "redis", "", "host:port or redis:// URL of a Redis to use (default an embedded one)")
	f.BoolVar(&o.console, "console", false, "show several limits with moving charts in a browser, until Ctrl-C")
	f.BoolVar(&o.priority, "priority", false, "show bookings beside searches, without priorities and with them, at 20/s unless --rate says otherwise")
	f.StringVar(&o.consoleAt, "console-listen", "127.0.0.1:8090", "address of the console")
}

// mostWait is what a row may have, too.
const mostWait = 1 << 53 * time.Microsecond

// seconds is a duration as a flag: 500ms, or a number of seconds.
type seconds time.Duration

// String implements pflag.Value.
func (s *seconds) String() string { return time.Duration(*s).String() }

// Type implements pflag.Value.
func (s *seconds) Type() string { return "duration" }

// Set implements pflag.Value.
func (s *seconds) Set(text string) error {
	d, ok := registry.ParseDuration(text)
	if !ok {
		return fmt.Errorf("want a duration such as 500ms, or seconds")
	}
	*s = seconds(d)
	return nil
}

// validate checks all flags before the demo starts.
func (o *options) validate(burstGiven bool) error {
	switch {
	case !(o.rate > 0 && o.rate <= maxRate):
		return flagError("rate", o.rate, fmt.Sprintf("permits per second, above 0 and at most %d", maxRate))
	case !(o.burst >= 0) || math.IsInf(o.burst, 0):
		return flagError("burst", o.burst, "a number of permits, 0 or more")
	case o.maxWait < 0 || o.maxWait > mostWait:
		return flagError("max-wait", o.maxWait, "seconds, 0 to 9007199254, or a duration such as 500ms")
	case o.instances < 1 || o.instances > maxInstances:
		return flagError("instances", o.instances, fmt.Sprintf("1 to %d", maxInstances))
	case o.duration < time.Second || o.duration > maxDuration:
		return flagError("duration", o.duration, fmt.Sprintf("1s to %v", maxDuration))
	case o.store != "script" && o.store != "lock" && o.store != "memory":
		return flagError("store", fmt.Sprintf("%q", o.store), "script, lock or memory")
	case o.warmup < 0 || o.warmup > time.Hour:
		return flagError("warmup", o.warmup, "a duration of at most 1h, or 0 for none")
	case o.warmup > 0 && burstGiven:
		return flagError("burst", o.burst, "none together with --warmup, whose stored permits are not free")
	case o.console && o.store == "memory":
		return flagError("store", `"memory"`, "script or lock together with --console, which reads its data from Redis")
	case o.console && o.warmup > 0:
		return flagError("warmup", o.warmup, "none together with --console, which has a limit of its own that warms up")
	case o.priority && (o.console || o.warmup > 0 || burstGiven):
		return flagError("priority", o.priority, "none of --console, --warmup and --burst beside it")
	case o.redis != "" && o.store == "memory":
		return flagError("redis", fmt.Sprintf("%q", redacted(o.redis)), "none together with --store memory")
	}
	if _, err := o.redisOptions(); err != nil {
		return err
	}
	return o.rehearse()
}

// rehearse creates a limiter to check the combination of flags: the library rejects a bucket that could never grant a call.
func (o *options) rehearse() error {
	l, err := o.limiter(tokenbucket.NewMemoryStore())
	if err == nil {
		_, err = l.TryReserve(context.Background(), 1, o.maxWait)
	}
	switch {
	case err == nil:
		return nil
	case o.warmup > 0:
		return fmt.Errorf("--rate %v --warmup %v --max-wait %v: %w", o.rate, o.warmup, o.maxWait, err)
	default:
		return fmt.Errorf("--rate %v --burst %v --max-wait %v: %w", o.rate, o.burst, o.maxWait, err)
	}
}

// limiter returns the limiter of one gateway.
func (o options) limiter(s tokenbucket.Store, opts ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	opts = append(opts, tokenbucket.WithStore(s), tokenbucket.WithMaxWait(o.maxWait))
	if o.warmup > 0 {
		return tokenbucket.NewSmoothWarmingUp(bucketName, o.rate, o.warmup, append(opts, tokenbucket.WithColdFactor(coldFactor))...)
	}
	// The bucket starts full so that the burst is visible. The demo's demand would never let it fill up.
	opts = append(opts, tokenbucket.WithMaxPermits(o.burst), tokenbucket.WithInitialPermits(o.burst))
	return tokenbucket.NewSmoothBursty(bucketName, o.rate, opts...)
}

// bound returns the constant part of the library's guarantee: any window of T seconds has at most bound + rate × T calls.
func (o *options) bound() float64 {
	if o.warmup > 0 {
		return 1 // stored permits are not free; one call may go before its permit is paid
	}
	return max(o.burst, 1)
}

// redisOptions parses --redis. It returns nil if the flag is empty.
func (o *options) redisOptions() (*redis.Options, error) {
	if o.redis == "" {
		return nil, nil
	}
	opts, err := parseRedis(o.redis)
	if err != nil {
		return nil, flagError("redis", fmt.Sprintf("%q", redacted(o.redis)), "host:port or a redis:// URL")
	}
	return opts, nil
}

func parseRedis(addr string) (*redis.Options, error) {
	if strings.Contains(addr, "://") {
		return redis.ParseURL(addr)
	}
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return &redis.Options{Addr: addr}, err
}

// redacted hides the password of a URL, even of an invalid one, for messages that may be logged.
func redacted(addr string) string {
	scheme, rest, isURL := strings.Cut(addr, "://")
	if at := strings.LastIndexByte(rest, '@'); isURL && at >= 0 {
		return scheme + "://xxxxx" + rest[at:]
	}
	return addr
}
