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

// options are the settings as given by flags, environment and file.
type options struct {
	trafficOptions
	limitOptions
	bucketOptions
	operationOptions
	consoleOptions

	given            *pflag.FlagSet    // the flags, including the values that load has set
	from             map[string]string // flag → source of its value, unless that is the command line
	variables        []string          // environment variables that are settings
	unknownVariables []string          // environment variables with the settings' prefix that are not settings
}

type trafficOptions struct {
	listen          string
	upstreams       []string
	upstreamTimeout time.Duration
	upstreamIdle    int
	upstreamIdleFor time.Duration
	bodyTimeout     time.Duration
	bodyRate        int
	responseTimeout time.Duration
	responseRate    int
	headerTimeout   time.Duration
	idleTimeout     time.Duration
	maxHeaderBytes  int
	maxConnections  int
	upgrades        []string
	upgradeTimeout  time.Duration
	key             string
	clientIPv4      int
	clientIPv6      int
	clientHeader    string
	match           string
	unknownStatus   int
	trusted         []string
	dropHeaders     []string
	priority        string
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
	confirm     bool
	shadow      bool
	interval    time.Duration
	loadTimeout time.Duration
	maxAge      time.Duration
	maxKeys     int
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
	adminHosts   []string
	publish      bool
	otlp         string
	otlpInterval time.Duration
	drain        time.Duration
	drainDelay   time.Duration
	logFormat    string
	logLevel     string
}

// flags declares all flags, in the order of the help.
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
		"wins, in whole segments; the path is forwarded with its prefix, appended to that of the URL")
	f.DurationVar(&o.upstreamTimeout, "upstream-timeout", 30*time.Second, "time until an upstream's response begins; 0: no limit")
	f.IntVar(&o.upstreamIdle, "upstream-idle", 256, "maximum number of idle connections that are kept for each upstream; 0: each call has a connection of its own")
	f.DurationVar(&o.upstreamIdleFor, "upstream-idle-timeout", 90*time.Second, "time after which an idle connection to an upstream is closed; 0: no limit. Shorter than the upstream's own")
	f.DurationVar(&o.bodyTimeout, "body-timeout", time.Minute, "how long a client may send no byte of its body while the gateway waits for it; then the "+
		"call ends with 408. 0: no limit")
	f.IntVar(&o.bodyRate, "body-rate", 1000, "bytes per second of its body that a client must send while the gateway waits for them; "+
		"it may be --body-timeout behind; 0: no minimum")
	f.DurationVar(&o.responseTimeout, "response-timeout", time.Minute, "how long a client may read no byte of its response while the gateway waits for it; then its "+
		"connection is closed. 0: no limit")
	f.IntVar(&o.responseRate, "response-rate", 1000, "bytes per second of its response that a client must read, as with --body-rate; 0: no minimum")
	f.DurationVar(&o.headerTimeout, "header-timeout", 10*time.Second, "time until a request's header must be complete")
	f.DurationVar(&o.idleTimeout, "idle-timeout", 2*time.Minute, "how long a connection may wait for its next request")
	f.IntVar(&o.maxHeaderBytes, "max-header-bytes", 64<<10, "maximum size of a request's line and header, 1024 to 1048576 bytes")
	f.IntVar(&o.maxConnections, "max-connections", 10_000, "maximum number of open client connections; a new one closes the longest idle one, or waits if none is idle. 0: no limit")
	f.StringSliceVar(&o.upgrades, "upgrade", []string{"websocket"}, "`protocol` to which a connection may be upgraded; may be repeated. Requests for others "+
		"are forwarded without the upgrade, as HTTP allows; none: --upgrade=")
	f.DurationVar(&o.upgradeTimeout, "upgrade-timeout", 10*time.Minute, "how long an upgraded connection may be silent in both directions; 0: no limit")
	f.StringVar(&o.key, "key", "path", "what names a call's bucket: path, client (its address) or header:NAME, whose value is then visible in "+
		"Redis and in the log. Several joined by +, such as path+header:X-Tenant, give keys joined by |")
	f.IntVar(&o.clientIPv4, "client-ipv4", 32, "how many bits of an IPv4 address name a client, 8 to 32")
	f.IntVar(&o.clientIPv6, "client-ipv6", 64, "how many bits of an IPv6 address name a client, 16 to 128")
	f.StringVar(&o.clientHeader, "client-header", "X-Forwarded-For", "`field` in which trusted proxies write the client's address; read from its end up to the "+
		"first address that is not trusted")
	f.StringVar(&o.match, "match", "clean", "which row matches a path: exact, the row of that name; clean, the same without a slash at the end and "+
		"parameters (;x=1); prefix, or else the longest row that is a prefix, in whole segments. Names are case-sensitive. A row that ends with "+
		"* matches all names that begin so, in each mode")
	f.StringSliceVar(&o.trusted, "trusted-proxy", nil, "`CIDR` of proxies in front of the gateway whose X-Forwarded-* fields are trusted; may be repeated")
	f.StringSliceVar(&o.dropHeaders, "drop-header", nil, "`field` that, like X-Forwarded-* and others, only trusted proxies may send; may be repeated")
	f.StringVar(&o.priority, "priority", "none", "where a call's priority comes from: none, or header:NAME, a field that only trusted proxies may send, "+
		"with normal, low or lowest. The row's priority counts if it is lower")
	f.BoolVar(&o.inbound, "inbound", false, "take the permit when a call arrives, not when it is forwarded: clients get RateLimit header "+
		"fields, and an upstream's Retry-After penalizes no bucket")
	f.StringVar(&o.unknown, "unknown", "pass", "calls without a row: pass, refuse, or permits per second for a bucket for each key")
	f.IntVar(&o.unknownStatus, "unknown-status", http.StatusNotFound, "response status of refused calls without a row, 400 to 599")
	f.DurationVar(&o.maxRetryAfter, "max-retry-after", time.Minute, "longest penalty that an upstream's Retry-After may give a bucket, at most 1h; "+
		"0: no penalties")
}

func (o *limitOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.limits, "limits", "", "`DSN` of the database: sqlite://FILE, mysql://user:password@host:3306/database (MariaDB too) or "+
		"postgres://user:password@host:5432/database; ?parameters are the driver's. Or file://FILE, a YAML file, such as file:///etc/tokenbucket/limits.yaml")
	f.StringVar(&o.table, "table", "t_ratelimite_conf", "`name` of the table")
	f.StringSliceVar(&o.columns, "columns", nil, "`setting=column` for columns with names of their own; may be repeated. Without it each setting's column has "+
		"its name: name, rate, max_wait, disabled; id and modified are configId and lastModifyTime; window, window_limit, concurrent, concurrent_wait, shadow, "+
		"per_key, penalty and priority are read if the table has them. burst, warmup, cold_factor, quota and jitter are read only if named here. Older names "+
		"are read, too: "+olderNames())
	f.BoolVar(&o.quota, "quota", false, "rates are hard quotas, counted in any sliding second: no permits are stored")
	f.DurationVar(&o.jitter, "jitter", 0, "how much later than released a quota's calls may reach the upstream, at most 1s")
	f.BoolVar(&o.createTable, "create-table", false, "create what is missing: the tables of limits, audit and switch, a SQLite file")
	f.StringVar(&o.badRows, "bad-rows", "refuse", "calls of a row that was never valid: refuse, pass, or permits "+
		"per second; a row that becomes bad later leaves its last valid limit in force")
	f.BoolVar(&o.allowEmpty, "allow-empty", false, "accept at once a table that is empty, or has lost more than half of its rows; without it "+
		"the lost limits stay in force until three loads in a row agree, and the loss is reported until it is confirmed (tokenbucket confirm)")
	f.BoolVar(&o.confirm, "confirm-losses", false, "never accept by itself a table that is empty, or has lost more than half of its rows: "+
		"the lost limits stay in force until the loss is confirmed (tokenbucket confirm, or the console)")
	f.BoolVar(&o.shadow, "shadow", false, "a dry run: decide and count, but refuse no call; the column shadow does so for one row")
	f.DurationVar(&o.interval, "interval", 5*time.Second, "how often the table or the file is read")
	f.DurationVar(&o.loadTimeout, "load-timeout", time.Minute, "how long reading it may take")
	f.DurationVar(&o.maxAge, "max-age", 0, "/readyz responds 503 if the limits are older, although they stay in force: an outage of the database then "+
		"takes the whole fleet out of service; 0: no maximum")
	f.IntVar(&o.maxKeys, "max-keys", 10_000, "how many new keys of a row with per_key, or without a row, get buckets of their own per hour; "+
		"further keys share one bucket until the hour is over")
	f.DurationVar(&o.wait, "wait", 30*time.Second, "how long to wait for the database at startup")
	f.StringVar(&o.switchAt, "switch", "none", "`place` of the fleet's switch: none, redis:KEY, or sql for the row 'global' of "+
		"t_ratelimite_switch. 0 there lets all calls pass; 1, or nothing, limits them")
}

// olderNames returns the older names of settings, with the names that they have now.
func olderNames() string {
	var all []string
	for _, f := range registry.Fields() {
		for _, older := range f.Older {
			if as := f.As(older); as.SameValues(f) {
				all = append(all, older+" for "+f.Key)
			}
		}
	}
	return strings.Join(all, ", ") + "; status, the opposite of disabled; and warmup_ms, in milliseconds, if named"
}

func (o *bucketOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.redis, "redis", "", "`address` of Redis: host:port, or a URL redis://, rediss:// or unix://; of a cluster host:port,host:port or "+
		"redis+cluster://host:port?addr=host:port; of sentinels redis+sentinel://host:port?master_name=NAME")
	f.StringVar(&o.store, "store", "script", "where buckets are stored: in Redis by script or lock, or in memory, for one gateway without Redis")
	f.StringVar(&o.keyPrefix, "key-prefix", "tokenbucket:", "prefix of the keys in Redis")
	f.DurationVar(&o.storeTimeout, "store-timeout", time.Second, "how long a call waits for Redis before it counts as an outage")
	f.StringVar(&o.fail, "fail", "closed", "calls during an outage of Redis: closed, they are answered with 503; open, they pass; share:N, each gateway uses its "+
		"local share of the rates, of N gateways until they have counted themselves. Faults that need a repair (a password, a right, a corrupt key) give 503 in any case")
}

func (o *operationOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.config, "config", "", "YAML `file` with settings")
	f.StringVar(&o.admin, "admin", "127.0.0.1:8081", "`address` of /healthz, /readyz, /stats, /metrics and /console; empty: none")
	f.StringSliceVar(&o.adminHosts, "admin-host", nil, "host `name` of --admin, such as that of a target of Prometheus, besides IP addresses, "+
		"localhost, this machine's host name and --console-host; may be repeated. Requests for other names get 421")
	f.BoolVar(&o.publish, "publish", true, "publish this gateway's state to consoles through Redis, every two seconds, with a history of a day; disable it with "+
		"--publish=false")
	f.StringVar(&o.otlp, "otlp", "", "`URL` of an OpenTelemetry collector, http://host:4318, that receives the metrics of /metrics")
	f.DurationVar(&o.otlpInterval, "otlp-interval", 15*time.Second, "how often metrics are exported")
	f.DurationVar(&o.drain, "drain", 30*time.Second, "how long calls in flight may take to end")
	f.DurationVar(&o.drainDelay, "drain-delay", 0, "how long new calls are still served while /readyz already responds 503")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json, on standard error")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
}

// bad returns an error that names a setting as it was given, its value, and what is accepted.
func (o *options) bad(flag string, value any, want string) error {
	return fmt.Errorf("%s %v: want %s", o.nameOf(flag), value, want)
}

// nameOf returns the name of a setting in the source that gave it: flag, variable or file.
func (o *options) nameOf(flag string) string {
	if name := o.from[flag]; name != "" {
		return name
	}
	return "--" + flag
}

// config holds the parsed settings.
type config struct {
	options
	routes   routes
	key      *keyMaker
	priority string // the canonical name of the field with a call's priority; empty if there is none
	proxies  []netip.Prefix
	unknown  registry.Otherwise
	badRows  registry.Otherwise
	database *database          // nil if the limits are in a file
	file     *filesource.Source // nil if the limits are in a database
	redis    *redisTarget       // nil if no setting needs Redis
	switchAt string             // "", "sql" or a key in Redis
	policy   tokenbucket.FailurePolicy
	level    slog.Level
	access   console.Access
}

// parse checks all settings, before any part of the gateway starts.
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
		{"upstream-idle-timeout", c.upstreamIdleFor, 0, time.Hour},
		{"body-timeout", c.bodyTimeout, 0, time.Hour},
		{"response-timeout", c.responseTimeout, 0, time.Hour},
		{"header-timeout", c.headerTimeout, time.Second, time.Hour},
		{"idle-timeout", c.idleTimeout, time.Second, time.Hour},
		{"upgrade-timeout", c.upgradeTimeout, 0, 24 * time.Hour},
		{"max-retry-after", c.maxRetryAfter, 0, time.Hour},
		{"jitter", c.jitter, 0, time.Second},
		{"interval", c.interval, 10 * time.Millisecond, time.Hour},
		{"load-timeout", c.loadTimeout, 10 * time.Millisecond, time.Hour},
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
	for _, n := range []struct {
		flag               string
		value, least, most int
	}{
		{"upstream-idle", c.upstreamIdle, 0, 1 << 20},
		{"body-rate", c.bodyRate, 0, 1 << 30},
		{"response-rate", c.responseRate, 0, 1 << 30},
		{"max-header-bytes", c.maxHeaderBytes, 1 << 10, 1 << 20},
		{"max-keys", c.maxKeys, 1, 10_000_000},
		{"max-connections", c.maxConnections, 0, 1 << 20},
		{"client-ipv4", c.clientIPv4, 8, 32},
		{"client-ipv6", c.clientIPv6, 16, 128},
	} {
		if n.value < n.least || n.value > n.most {
			return c.bad(n.flag, n.value, fmt.Sprintf("%d to %d", n.least, n.most))
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

// parseKeys parses the settings of keys and of trusted proxies.
func (c *config) parseKeys() (err error) {
	if c.proxies, err = c.networks("trusted-proxy", c.trusted); err != nil {
		return err
	}
	for _, names := range []struct {
		flag  string
		names []string
	}{{"client-header", []string{c.clientHeader}}, {"drop-header", c.dropHeaders}, {"upgrade", c.upgrades}} {
		for _, name := range names.names {
			if !validHeader(name) {
				return c.bad(names.flag, fmt.Sprintf("%q", name), "a name of letters, digits and hyphens")
			}
		}
	}
	key, keyErr := parseKey(c.options.key, c.clientKey())
	if keyErr != nil {
		keyErr.Setting = c.nameOf("key")
		return keyErr
	}
	c.key = key
	for _, name := range append(slices.Clone(c.dropHeaders), c.clientHeader) {
		c.key.fields.proxies = append(c.key.fields.proxies, http.CanonicalHeaderKey(name))
	}
	return c.parsePriority()
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

// networks parses addresses and CIDRs.
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

// otherwise parses a setting that decides about calls without a valid row.
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
	return registry.Default(registry.Limit{Rate: rate, MaxWait: registry.DefaultMaxWait}), nil
}

// validHeader reports whether a name is a token of RFC 9110.
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
	for _, s := range c.columns {
		key, column, ok := strings.Cut(s, "=")
		name := names.Column(key)
		if name == nil || !ok || column == "" {
			return c.bad("columns", fmt.Sprintf("%q", s), "setting=column with a setting of "+strings.Join(sqlsource.ColumnKeys(), ", "))
		}
		*name = column
	}
	if c.allowEmpty && c.confirm {
		return c.bad("confirm-losses", true, "false together with --allow-empty, which accepts losses at once")
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
		return c.bad("jitter", c.jitter, "none without --quota or a column quota")
	default:
		db.options = append(db.options, sqlsource.WithJitter(c.jitter))
	}
	if _, err := sqlsource.Schema(db.dialect, db.options...); err != nil {
		return c.bad("table", fmt.Sprintf("%q --columns %q", c.table, c.columns), "valid names for the database: "+err.Error())
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
