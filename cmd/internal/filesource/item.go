package filesource

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

const (
	defaultCache = 0.5
	maxCache     = 9.99
	maxName      = 512
	maxExact     = 1 << 53 // beyond it a double does not hold every whole number
	maxQuota     = math.MaxInt32
	maxWarmup    = 100 * 365 * 24 * time.Hour
	maxWindow    = 90 * 24 * time.Hour
)

// field is a key of an item. read returns false if the text is not a valid value.
type field struct {
	key, want string
	read      func(l *registry.Limit, text string) bool
}

// fields are all keys, in the order in which they are read.
var fields = []field{
	{"name", "a name, 1 to 512 bytes of UTF-8", func(l *registry.Limit, text string) bool {
		if len(text) < 1 || len(text) > maxName || !utf8.ValidString(text) {
			return false
		}
		l.Name = text
		return true
	}},
	{"disabled", "true or false", func(l *registry.Limit, text string) bool { return flag(&l.Disabled, text) }},
	{"rate", "a number of permits per second from 1e-9 to 2^53, or 0: nothing passes", func(l *registry.Limit, text string) bool {
		if l.NoRate = text == "none"; l.NoRate {
			return true
		}
		return number(&l.Rate, text, 0, maxExact) && (l.Rate == 0 || l.Rate >= 1e-9)
	}},
	{"cache", "a share of a second from 0 to 9.99", func(l *registry.Limit, text string) bool { return number(&l.WaitShare, text, 0, maxCache) }},
	{"burst", "a number of permits from 0 to 2^53", func(l *registry.Limit, text string) bool {
		l.MaxPermits = new(float64)
		return number(l.MaxPermits, text, 0, maxExact)
	}},
	{"warmup", "a duration such as 4s, 0s to 876000h", func(l *registry.Limit, text string) bool { return duration(&l.Warmup, text, maxWarmup) }},
	{"cold_factor", "a number above 1, at most 2^53", func(l *registry.Limit, text string) bool {
		return number(&l.ColdFactor, text, 0, maxExact) && l.ColdFactor > 1
	}},
	{"quota", "true or false", func(l *registry.Limit, text string) bool { return flag(&l.Quota, text) }},
	{"jitter", "a duration such as 50ms, 0s to 1s", func(l *registry.Limit, text string) bool { return duration(&l.Jitter, text, time.Second) }},
	{"shadow", "true or false", func(l *registry.Limit, text string) bool { return flag(&l.Shadow, text) }},
	{"per_key", "true or false", func(l *registry.Limit, text string) bool { return flag(&l.PerKey, text) }},
	{"window", "a duration in whole milliseconds such as 24h, 1ms to 2160h", func(l *registry.Limit, text string) bool {
		return duration(&l.Window, text, maxWindow) && l.Window > 0 && l.Window%time.Millisecond == 0
	}},
	{"window_limit", "a whole number of calls, 1 to 2147483647", func(l *registry.Limit, text string) bool { return calls(&l.WindowLimit, text) }},
	{"penalty", registry.WantPenalty, func(l *registry.Limit, text string) (ok bool) {
		l.Penalty, ok = registry.ParsePenalty(text)
		return ok
	}},
	{"concurrent", "a whole number of calls, 1 to 2147483647", func(l *registry.Limit, text string) bool { return calls(&l.Concurrent, text) }},
}

// number reads a decimal number. Infinite ones, those that are not numbers, and other notations are not ok.
func number(to *float64, text string, least, most float64) bool {
	f, err := strconv.ParseFloat(text, 64)
	*to = f
	return err == nil && strings.Trim(text, "0123456789.+-eE") == "" && f >= least && f <= most
}

func duration(to *time.Duration, text string, most time.Duration) bool {
	d, err := time.ParseDuration(text)
	*to = d
	return err == nil && d >= 0 && d <= most
}

func calls(to *int, text string) bool {
	n, err := strconv.ParseInt(text, 10, 32)
	*to = int(n)
	return err == nil && n > 0
}

func flag(to *bool, text string) bool {
	*to = text == "true"
	return *to || text == "false"
}

// parser reads one item.
type parser struct {
	file  string
	line  int // of the item
	limit registry.Limit
	nodes map[string]*yaml.Node // by key
}

func (p *parser) reject(key string, n *yaml.Node, want string) *registry.RowError {
	line := p.line
	if n != nil {
		line = n.Line
	}
	return &registry.RowError{Row: fmt.Sprint(p.file, ":", line), Name: p.limit.Name, Field: key, Value: show(n), Want: want, Shadow: p.limit.Shadow}
}

// read converts the item, or returns the reason for rejecting it. Of a disabled item only the name is checked.
func (p *parser) read(n *yaml.Node, jitter time.Duration) *registry.RowError {
	item := resolve(n)
	if item.Kind != yaml.MappingNode {
		return p.reject("item", item, "a map with name and rate")
	}
	bad := p.collect(item)
	for _, f := range fields {
		value := p.nodes[f.key]
		needed := f.key == "name" || f.key == "rate"
		if (value != nil || needed) && !p.take(&f, value) {
			p.keep(&bad, f.key, value, f.want)
		}
		switch {
		case p.limit.Name == "":
			return p.reject(f.key, value, f.want)
		case p.limit.Disabled:
			return nil
		}
	}
	if bad != nil {
		bad.Name, bad.Shadow = p.limit.Name, p.limit.Shadow
		return bad
	}
	if p.limit.NoRate && p.nodes["quota"] == nil { // what the source says is of rates
		p.limit.Quota = false
	}
	if p.limit.Quota && p.nodes["jitter"] == nil {
		p.limit.Jitter = jitter
	}
	return p.shape()
}

// take stores a value in the limit, and reports whether it is valid.
func (p *parser) take(f *field, value *yaml.Node) bool {
	return value != nil && value.Kind == yaml.ScalarNode && value.ShortTag() != "!!null" && f.read(&p.limit, value.Value)
}

// keep keeps the first thing that is wrong.
func (p *parser) keep(bad **registry.RowError, key string, n *yaml.Node, want string) {
	if *bad == nil {
		*bad = p.reject(key, n, want)
	}
}

// collect finds the values by their keys, and the first key that is none.
func (p *parser) collect(item *yaml.Node) (bad *registry.RowError) {
	p.nodes = map[string]*yaml.Node{}
	var known []string
	for _, f := range fields {
		known = append(known, f.key)
	}
	for i := 0; i < len(item.Content); i += 2 {
		key, value := item.Content[i], resolve(item.Content[i+1])
		switch {
		case !has(known, key):
			p.keep(&bad, "key", key, "one of "+strings.Join(known, ", "))
		case p.nodes[key.Value] != nil:
			p.keep(&bad, "key", key, "each key once")
		default:
			p.nodes[key.Value] = value
		}
	}
	return bad
}

func has(known []string, key *yaml.Node) bool {
	for _, k := range known {
		if key.Kind == yaml.ScalarNode && key.Value == k {
			return true
		}
	}
	return false
}

// shape checks what values must not be together.
func (p *parser) shape() *registry.RowError {
	l := &p.limit
	for _, wrong := range []struct {
		is        bool
		key, want string
	}{
		{strings.Contains(strings.TrimSuffix(l.Name, "*"), "*"), "name", "a * at its end only, for all names that begin so"},
		{l.Quota && (l.Rate != math.Trunc(l.Rate) || l.Rate > maxQuota), "rate", "a whole number of calls in any second, 0 to 2147483647: the item is a quota"},
		{l.Quota && l.Warmup > 0, "warmup", "none: the item is a quota"},
		{l.Quota && l.MaxPermits != nil, "burst", "none: the item is a quota"},
		{l.Warmup > 0 && l.MaxPermits != nil, "burst", "none: the item has a warm-up, which says what is saved up"},
		{l.Warmup == 0 && l.ColdFactor != 0, "cold_factor", "none without a warm-up"},
		{!l.Quota && l.Jitter != 0, "jitter", "none: the item is no quota"},
		{l.Window != 0 && l.WindowLimit == 0, "window_limit", "1 to 2147483647: the item has a window"},
		{l.Window == 0 && l.WindowLimit != 0, "window", "a duration: the item has a limit for a window"},
		{l.NoRate && l.Window == 0 && l.Concurrent == 0, "rate", "a rate, a window or concurrent"},
		{l.NoRate && l.MaxPermits != nil, "burst", "none: the item has no rate"},
		{l.NoRate && l.Warmup > 0, "warmup", "none: the item has no rate"},
		{l.NoRate && l.Quota, "quota", "none: the item has no rate"},
	} {
		if wrong.is {
			return p.reject(wrong.key, p.nodes[wrong.key], wrong.want)
		}
	}
	return nil
}
