package fleet

import (
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Client is the part of a go-redis client that this package needs. All of them implement it.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Option configures a Reader or a Publisher.
type Option func(*settings)

type settings struct {
	prefix string
	log    *slog.Logger
	most   int // bytes
}

func newSettings(opts []Option) settings {
	s := settings{prefix: "tokenbucket:", log: slog.Default(), most: 256 << 20}
	for _, o := range opts {
		o(&s)
	}
	return s
}

// WithKeyPrefix sets the prefix of all keys in Redis: up to 512 bytes without braces. The default is "tokenbucket:", as of
// limiters.
func WithKeyPrefix(p string) Option { return func(s *settings) { s.prefix = p } }

// WithLogger sets where a Publisher logs, once, that Redis refuses its writes. The default is slog.Default().
func WithLogger(l *slog.Logger) Option { return func(s *settings) { s.log = l } }

// WithReadLimit bounds the memory that a Reader uses for the publications of all instances, in bytes. The default is 256 MB: enough for 20
// instances of 10,000 limits, or 200 of 1,000. Instances that do not fit are left out and reported in Snapshot.Skipped.
func WithReadLimit(bytes int) Option { return func(s *settings) { s.most = bytes } }

func (s *settings) check() error {
	if s.most <= 0 {
		return fmt.Errorf("fleet: read limit %d: want at least 1 byte", s.most)
	}
	if strings.ContainsAny(s.prefix, "{}") || len(s.prefix) > 512 {
		return fmt.Errorf("fleet: key prefix %.40q: want up to 512 bytes without braces", s.prefix)
	}
	return nil
}

var (
	//go:embed beat.lua
	beatSource string
	//go:embed scan.lua
	scanSource string
	//go:embed range.lua
	rangeSource string
	//go:embed history.lua
	historySource string
	//go:embed announce.lua
	announceSource string

	beatScript    = newScript(beatSource)
	scanScript    = newScript(scanSource)
	rangeScript   = newScript(rangeSource)
	historyScript = newScript(historySource)

	announceScript = script{source: announceSource, hash: redis.NewScript(announceSource).Hash(), once: true} // without retries: a second execution would add a second event
)

// All keys share one hash tag, so that a cluster keeps them on one server. A record and its share of the history then change
// together, and a beat is one script. One server suffices for a large fleet: see docs/fleet.md.

func (s *settings) instancesKey() string         { return s.prefix + "{fleet}:instances" }
func (s *settings) instanceKey(id string) string { return s.prefix + "{fleet}:i:" + id }
func (s *settings) rowsKey(id string) string     { return s.prefix + "{fleet}:c:" + id }
func (s *settings) eventsKey() string            { return s.prefix + "{fleet}:events" }
func (s *settings) publishedKey(hour int64) string {
	return s.prefix + "{fleet}:h:" + strconv.FormatInt(hour, 10)
}

func (s *settings) historyKey(hour int64, name string) string {
	return s.publishedKey(hour) + ":" + name
}

// Fields of an instance, besides those that the script writes itself (beat, started, seen, ended).
const (
	infoField     = "info"
	rejectedField = "rejected"
	refusedField  = "refused"
	refusalsField = "refusals"
	lowerField    = "priorities"
	faultsField   = "faults"
	rowsField     = "rows" // changes whenever the rows of the limits change

	recordPrefix    = "=" // followed by the limit's name
	semaphorePrefix = "s:"
	windowPrefix    = "w:"
)
