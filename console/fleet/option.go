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

// Client is the least that is needed of a client of go-redis: any of them will do.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Option configures a Reader or a Publisher.
type Option func(*settings)

type settings struct {
	prefix string
	log    *slog.Logger
}

func newSettings(opts []Option) settings {
	s := settings{prefix: "tokenbucket:", log: slog.Default()}
	for _, o := range opts {
		o(&s)
	}
	return s
}

// WithKeyPrefix sets what the keys in Redis begin with: up to 512 bytes without braces. Default: tokenbucket:, as of limiters.
func WithKeyPrefix(p string) Option { return func(s *settings) { s.prefix = p } }

// WithLogger sets where a Publisher logs, once, that Redis refuses what it writes. Default: slog.Default().
func WithLogger(l *slog.Logger) Option { return func(s *settings) { s.log = l } }

func (s *settings) check() error {
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

	announceScript = script{source: announceSource, hash: redis.NewScript(announceSource).Hash(), once: true} // sent twice, it adds two events
)

// All keys have one hash tag, so that in a cluster they are on one server: what an instance says of a limit and what that adds to
// the limit's history change together, and a beat is one script. One server takes the beats of a large fleet: see docs/fleet.md.

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

// Fields of an instance, beside those that the script writes itself (beat, started, seen, ended).
const (
	infoField     = "info"
	rejectedField = "rejected"
	refusedField  = "refused"
	refusalsField = "refusals"
	faultsField   = "faults"
	rowsField     = "rows" // changes when the rows of the limits have

	recordPrefix    = "=" // and the limit's name
	semaphorePrefix = "s:"
	windowPrefix    = "w:"
)
