package gateway

import (
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/cmd/internal/filesource"
	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// options are the settings as they are given.
type options struct {
	trafficOptions
	limitOptions
	bucketOptions
	operationOptions
	consoleOptions

	given     *pflag.FlagSet    // with what load has put into it
	from      map[string]string // flag → where its value is from, if it is not from a flag
	variables []string          // that are settings
	strangers []string          // variables that begin as settings do, and are none
}

type trafficOptions struct {
	listen          string
	upstreams       []string
	upstreamTimeout time.Duration
	bodyTimeout     time.Duration
	key             string
	match           string
	unknownStatus   int
	trusted         []string
	inbound         bool
	unknown         string
	maxRetryAfter   time.Duration
}

type limitOptions struct {
	limits      string
	table       string
	columns     []string
	quota       bool
	jitter      time.Duration
	createTable bool
	badRows     string
	allowEmpty  bool
	shadow      bool
	interval    time.Duration
	maxAge      time.Duration
	wait        time.Duration
	switchAt    string
}

type bucketOptions struct {
	redis        string
	store        string
	keyPrefix    string
	storeTimeout time.Duration
	fail         string
}

type operationOptions struct {
	config       string
	admin        string
	publish      bool
	otlp         string
	otlpInterval time.Duration
	drain        time.Duration
	drainDelay   time.Duration
	logFormat    string
	logLevel     string
}

// flags declares all of them, in the order of the help.
func (o *options) flags() []group {
	var groups []group
	for _, g := range []struct {
		title   string
		declare func(*pflag.FlagSet)
	}{
		{"Traffic", o.trafficOptions.flags},
		{"Limits", o.limitOptions.flags},
		{"Buckets", o.bucketOptions.flags},
		{"Operation", o.operationOptions.flags},
		{"Console", o.consoleOptions.flags},
	} {
		f := pflag.NewFlagSet(g.title, pflag.ContinueOnError)
		f.SortFlags = false
		g.declare(f)
		groups = append(groups, group{g.title, f})
	}
	return groups
}

func (o *trafficOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "listen", ":8080", "`address` to serve on")
	f.StringArrayVar(&o.upstreams, "upstream", nil, "`URL` to forward to, or /prefix=URL for some paths; may be repeated. The longest prefix "+
		"counts, in whole segments; the path is sent on with its prefix, appended to that of the URL")
	f.DurationVar(&o.upstreamTimeout, "upstream-timeout", 30*time.Second, "until an upstream's answer begins; 0: no limit")
	f.DurationVar(&o.bodyTimeout, "body-timeout", time.Minute, "how long a client may send nothing of its body while that is waited for; then the "+
		"call ends with 408. 0: no limit")
	f.StringVar(&o.key, "key", "path", "what names a call's bucket: path, client (its address) or header:NAME, whose value then shows in "+
		"Redis and in the log. Several with + between, such as path+header:X-Tenant, make keys with | between")
	f.StringVar(&o.match, "match", "clean", "which row counts for a path: exact, of that name; clean, without a slash at the end and without "+
		"parameters (;x=1); prefix, or else the longest that holds it, in whole segments. Letter case counts. A row with a * at its end "+
		"holds for all that begins so, with each of these")
	f.StringSliceVar(&o.trusted, "trusted-proxy", nil, "`CIDR` of proxies in front, whose X-Forwarded-* are believed; may be repeated")
	f.BoolVar(&o.inbound, "inbound", false, "take the permit when a call arrives, not when it is sent on: clients are told with RateLimit "+
		"header fields, and an upstream's Retry-After holds nothing back")
	f.StringVar(&o.unknown, "unknown", "pass", "calls without a row: pass, refuse, or permits per second for a bucket of each key's own")
	f.IntVar(&o.unknownStatus, "unknown-status", http.StatusNotFound, "what calls without a row are answered if they are refused, 400 to 599")
	f.DurationVar(&o.maxRetryAfter, "max-retry-after", time.Minute, "how long an upstream's Retry-After may hold a bucket back, at most 1h; "+
		"0: not at all")
}

func (o *limitOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.limits, "limits", "", "`DSN` of the database: sqlite://FILE, mysql://user:password@host:3306/database (MariaDB too) or "+
		"postgres://user:password@host:5432/database; ?parameters are the driver's. Or file://FILE, a YAML file, such as file:///etc/tokenbucket/limits.yaml")
	f.StringVar(&o.table, "table", "t_ratelimite_conf", "`name` of the table")
	f.StringSliceVar(&o.columns, "columns", nil, "`field=column` where the table has other names; may be repeated. Fields are id, name, rate, "+
		"cache, status, modified; burst, warmup_ms, cold_factor and quota are read only if named here; window (in seconds), window_limit, concurrent, "+
		"shadow and per_key also if the table has columns window, windowLimit, concurrent, shadow and perKey")
	f.BoolVar(&o.quota, "quota", false, "rates are hard quotas, counted in any sliding second: nothing is saved up")
	f.DurationVar(&o.jitter, "jitter", 0, "how unevenly calls reach a quota's upstream, at most 1s")
	f.BoolVar(&o.createTable, "create-table", false, "create what is missing: the table, that of the audit, the switch's, a SQLite file")
	f.StringVar(&o.badRows, "bad-rows", "refuse", "calls of a row that is bad, and was bad when it was first seen: refuse, pass, or permits "+
		"per second; a row that turns bad later leaves its last good limit in force")
	f.BoolVar(&o.allowEmpty, "allow-empty", false, "believe at once that a table is empty, or has lost more than half of its rows; without it "+
		"their limits stay in force until three loads in a row agree")
	f.BoolVar(&o.shadow, "shadow", false, "a dry run: decide, count and tell, but refuse nothing; the column shadow says so for one row")
	f.DurationVar(&o.interval, "interval", 5*time.Second, "how often the table or the file is read")
	f.DurationVar(&o.maxAge, "max-age", 0, "beyond this age of the limits /readyz says 503, though they stay in force: a database that is away then "+
		"takes the whole fleet out of service; 0: any age will do")
	f.DurationVar(&o.wait, "wait", 30*time.Second, "how long to wait for the database at the start")
	f.StringVar(&o.switchAt, "switch", "none", "`place` of the fleet's switch: none, redis:KEY, or sql for the row 'global' of "+
		"t_ratelimite_switch. 0 there lets all calls pass; 1, or nothing, limits them")
}

func (o *bucketOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.redis, "redis", "", "`address` of Redis: host:port, or a URL redis://, rediss:// or unix://; of a cluster host:port,host:port or "+
		"redis+cluster://host:port?addr=host:port; of sentinels redis+sentinel://host:port?master_name=NAME")
	f.StringVar(&o.store, "store", "script", "how buckets are kept: script, lock, or memory, for one gateway without Redis")
	f.StringVar(&o.keyPrefix, "key-prefix", "tokenbucket:", "what the keys in Redis begin with")
	f.DurationVar(&o.storeTimeout, "store-timeout", time.Second, "how long a call waits for Redis before that counts as down")
	f.StringVar(&o.fail, "fail", "closed", "calls while Redis is down: closed, they are answered 503; open, they pass; share:N, each gateway goes on with "+
		"its part of the rates, of N gateways until they have counted themselves. What must be repaired (a password, a right, a corrupt key) is 503 with all")
}

func (o *operationOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.config, "config", "", "YAML `file` with settings")
	f.StringVar(&o.admin, "admin", "127.0.0.1:8081", "`address` of /healthz, /readyz, /stats, /metrics and /console; empty: none")
	f.BoolVar(&o.publish, "publish", true, "tell consoles through Redis, every two seconds, what this gateway does, with a history of a day; --publish=false: "+
		"not at all")
	f.StringVar(&o.otlp, "otlp", "", "`URL` of an OpenTelemetry collector, http://host:4318, that gets what /metrics has")
	f.DurationVar(&o.otlpInterval, "otlp-interval", 15*time.Second, "how often it gets that")
	f.DurationVar(&o.drain, "drain", 30*time.Second, "how long calls under way may take to end")
	f.DurationVar(&o.drainDelay, "drain-delay", 0, "how long new calls are still served while /readyz says 503 already")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json, on standard error")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
}

// bad names a setting as it was given, its value and what was wanted.
func (o *options) bad(flag string, value any, want string) error {
	return fmt.Errorf("%s %v: want %s", o.nameOf(flag), value, want)
}

// nameOf is a setting as it was given.
func (o *options) nameOf(flag string) string {
	if name := o.from[flag]; name != "" {
		return name
	}
	return "--" + flag
}

// config is the settings as they are used.
type config struct {
	options
	routes   routes
	key      *keyMaker
	proxies  []netip.Prefix
	unknown  registry.Otherwise
	badRows  registry.Otherwise
	database *database          // nil: the limits are in a file
	file     *filesource.Source // nil: they are in a database
	redis    *redisTarget       // nil: none is needed
	switchAt string             // "", "sql" or a key in Redis
	policy   tokenbucket.FailurePolicy
	level    slog.Level
	access   console.Access
}

// parse checks everything before anything is started.
func (o *options) parse() (*config, error) {
	c := &config{options: *o}
	for _, check := range []func() error{
		c.checkNumbers, c.checkWords, c.checkAddresses, c.parseKeys, c.parseTraffic, c.parseLimits, c.parseBuckets, c.parseConsole,
	} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *config) checkNumbers() error {
	for _, d := range []struct {
		flag        string
		value       time.Duration
		least, most time.Duration
	}{
		{"upstream-timeout", c.upstreamTimeout, 0, time.Hour},
		{"body-timeout", c.bodyTimeout, 0, time.Hour},
		{"max-retry-after", c.maxRetryAfter, 0, time.Hour},
		{"jitter", c.jitter, 0, time.Second},
		{"interval", c.interval, 10 * time.Millisecond, time.Hour},
		{"max-age", c.maxAge, 0, math.MaxInt64},
		{"wait", c.wait, 100 * time.Millisecond, time.Hour},
		{"store-timeout", c.storeTimeout, time.Millisecond, time.Minute},
		{"otlp-interval", c.otlpInterval, 100 * time.Millisecond, time.Hour},
		{"drain", c.drain, 0, 24 * time.Hour},
		{"drain-delay", c.drainDelay, 0, time.Hour},
	} {
		if d.value < d.least || d.value > d.most {
			want := fmt.Sprintf("%v to %v", d.least, d.most)
			if d.most == math.MaxInt64 {
				want = "a duration that is not negative"
			}
			return c.bad(d.flag, d.value, want)
		}
	}
	return nil
}

func (c *config) checkWords() error {
	for _, w := range []struct {
		flag, value string
		known       []string
	}{
		{"store", c.store, []string{"script", "lock", "memory"}},
		{"match", c.match, matches},
		{"log-format", c.logFormat, []string{"text", "json"}},
		{"log-level", c.logLevel, []string{"debug", "info", "warn", "error"}},
	} {
		if !slices.Contains(w.known, w.value) {
			return c.bad(w.flag, fmt.Sprintf("%q", w.value), strings.Join(w.known, ", "))
		}
	}
	return c.level.UnmarshalText([]byte(c.logLevel))
}

func (c *config) checkAddresses() error {
	const want = "host:port or :port"
	if !listenable(c.listen) {
		return c.bad("listen", fmt.Sprintf("%q", c.listen), want)
	}
	if c.admin != "" && !listenable(c.admin) {
		return c.bad("admin", fmt.Sprintf("%q", c.admin), want+", or nothing")
	}
	return c.checkOTLP()
}

func listenable(addr string) bool {
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return err == nil
}

// parseKeys reads what keys are made of.
func (c *config) parseKeys() (err error) {
	if c.proxies, err = c.networks("trusted-proxy", c.trusted); err != nil {
		return err
	}
	key, wrong := parseKey(c.options.key, c.proxies)
	if wrong != nil {
		wrong.Setting = c.nameOf("key")
		return wrong
	}
	c.key = key
	return nil
}

func (c *config) parseTraffic() error {
	var err error
	if c.unknown, err = c.otherwise("unknown", c.options.unknown); err != nil {
		return err
	}
	if c.badRows, err = c.otherwise("bad-rows", c.options.badRows); err != nil {
		return err
	}
	if c.unknownStatus < 400 || c.unknownStatus > 599 {
		return c.bad("unknown-status", c.unknownStatus, "400 to 599")
	}
	if len(c.upstreams) == 0 {
		return c.bad("upstream", "missing", "a URL to forward to")
	}
	for _, s := range c.upstreams {
		if err := c.routes.add(s); err != "" {
			return c.bad("upstream", fmt.Sprintf("%q", hideURL(s)), err)
		}
	}
	return nil
}

// networks reads addresses and CIDRs.
func (c *config) networks(flag string, list []string) (all []netip.Prefix, err error) {
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if addr, e := netip.ParseAddr(s); e == nil {
			p, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		if p.Addr().Is4In6() && p.Bits() >= 96 { // it is compared with an IPv4 address
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		if err != nil {
			return nil, c.bad(flag, fmt.Sprintf("%q", s), "an address or a CIDR such as 10.0.0.0/8")
		}
		all = append(all, p)
	}
	return all, nil
}

// otherwise reads what happens to calls that no good row decides about.
func (c *config) otherwise(flag, value string) (registry.Otherwise, error) {
	switch value {
	case "pass":
		return registry.Pass(), nil
	case "refuse":
		return registry.Refuse(), nil
	}
	rate, err := strconv.ParseFloat(value, 64)
	if err != nil || !(rate >= 0.001 && rate <= 10_000_000) {
		return registry.Otherwise{}, c.bad(flag, fmt.Sprintf("%q", value), "pass, refuse or a rate, 0.001 to 10000000 permits per second")
	}
	return registry.Default(registry.Limit{Rate: rate, Cache: 0.5}), nil
}

// validHeader tells whether a name is a token of RFC 9110.
func validHeader(name string) bool {
	for _, b := range []byte(name) {
		if (b|0x20 < 'a' || b|0x20 > 'z') && (b < '0' || b > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(b)) {
			return false
		}
	}
	return name != ""
}

func (c *config) parseLimits() error {
	var names sqlsource.Columns
	fields := map[string]*string{
		"id": &names.ID, "name": &names.Name, "rate": &names.Rate, "cache": &names.Cache, "status": &names.Status,
		"modified": &names.Modified, "burst": &names.Burst, "warmup_ms": &names.WarmupMillis, "cold_factor": &names.ColdFactor,
		"quota": &names.Quota, "shadow": &names.Shadow, "per_key": &names.PerKey,
		"window": &names.Window, "window_limit": &names.WindowLimit, "concurrent": &names.Concurrent,
	}
	for _, s := range c.columns {
		field, column, ok := strings.Cut(s, "=")
		if fields[field] == nil || !ok || column == "" {
			return c.bad("columns", fmt.Sprintf("%q", s),
				"field=column with a field of id, name, rate, cache, status, modified, burst, warmup_ms, cold_factor, quota, window, window_limit, "+
					"concurrent, shadow, per_key")
		}
		*fields[field] = column
	}
	if c.limits == "" {
		return c.bad("limits", "missing", wantDSN)
	}
	if path, ok := strings.CutPrefix(c.limits, fileScheme); ok {
		return c.parseFile(path)
	}
	db, err := parseDSN(c.limits, c.createTable)
	if err != "" {
		return c.bad("limits", fmt.Sprintf("%q", hideDSN(c.limits)), err)
	}
	db.options = []sqlsource.Option{sqlsource.WithTable(c.table), sqlsource.WithColumns(names)}
	switch {
	case c.quota:
		db.options = append(db.options, sqlsource.WithQuota(c.jitter))
	case c.jitter != 0 && names.Quota == "":
		return c.bad("jitter", c.jitter, "none without --quota or a column for it")
	default:
		db.options = append(db.options, sqlsource.WithJitter(c.jitter))
	}
	if _, err := sqlsource.Schema(db.dialect, db.options...); err != nil {
		return c.bad("table", fmt.Sprintf("%q --columns %q", c.table, c.columns), "names that the database knows: "+err.Error())
	}
	c.database = db
	return nil
}

func (c *config) parseBuckets() error {
	key, isKey := strings.CutPrefix(c.options.switchAt, "redis:")
	switch {
	case c.options.switchAt == "none":
	case c.options.switchAt == "sql":
		c.switchAt = "sql"
	case isKey && len(key) >= 1 && len(key) <= 512:
		c.switchAt = c.options.switchAt
	default:
		return c.bad("switch", fmt.Sprintf("%q", c.options.switchAt), "none, redis:KEY or sql")
	}
	if strings.ContainsAny(c.keyPrefix, "{}") || len(c.keyPrefix) > 512 {
		return c.bad("key-prefix", fmt.Sprintf("%.40q", c.keyPrefix), "at most 512 bytes without braces")
	}
	switch share, isShare := strings.CutPrefix(c.fail, "share:"); {
	case c.fail == "closed":
	case c.fail == "open":
		c.policy = tokenbucket.FailOpen
	default:
		n, err := strconv.Atoi(share)
		if !isShare || err != nil || n < 1 {
			return c.bad("fail", fmt.Sprintf("%q", c.fail), "closed, open, or share:N with N at least 1")
		}
		c.policy = tokenbucket.LocalShare(n)
	}
	needed := c.store != "memory" || isKey
	switch {
	case c.options.redis == "" && needed:
		return c.bad("redis", "missing", wantRedis+"; --store memory without --switch redis:KEY needs none")
	case c.options.redis == "":
		return nil
	case !needed:
		return c.bad("redis", fmt.Sprintf("%q", hideURL(c.options.redis)), "none together with --store memory")
	}
	target, err := parseRedis(c.options.redis)
	if err != nil {
		return c.bad("redis", fmt.Sprintf("%q", hideURL(c.options.redis)), wantRedis)
	}
	c.redis = target
	return nil
}
