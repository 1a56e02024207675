// Package condition names the states of a gateway that decide whether its limits count: of Redis, of the switch, and of the rows.
//
// /readyz, /stats, /metrics, the log, tokenbucket check and the console report a state in the words of this package, so that an operator
// finds the same words in all of them. The package is pure: what it says follows from its arguments alone.
package condition

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// Part is a part of a gateway that has states.
type Part string

// The parts.
const (
	Redis  Part = "redis"
	Switch Part = "switch"
	Rows   Part = "rows"
)

// States of the parts. OK is that of a part without a problem.
const (
	OK = "ok"

	// Of Redis.
	Slow     = "slow"      // replies late, yet in time
	Away     = "away"      // cannot be reached
	Hung     = "hung"      // does not reply in time
	Full     = "full"      // refuses writes, since its memory is used up
	ReadOnly = "read_only" // is a replica
	Unable   = "unable"    // replies that it cannot serve now: it loads its data, or runs a script
	Refused  = "refused"   // refuses the password, a right, or a key: an operator must repair that

	// Of the switch.
	Off     = "off"
	Unknown = "unknown" // cannot be read

	// Of the rows.
	Bad   = "bad"   // some are rejected
	Held  = "held"  // more than half are gone from the table, and still in force
	Lost  = "lost"  // more than half are gone from the table, and no longer in force
	None  = "none"  // there are none
	Stale = "stale" // the table or the file cannot be read
	// Off: all are off. Outdated: the source gives earlier ones than it gave before, or than another gateway has loaded.
	Outdated = "outdated"
)

// States lists all states of each part, for series that exist before their first event.
var States = map[Part][]string{
	Redis:  {OK, Slow, Away, Hung, Full, ReadOnly, Unable, Refused},
	Switch: {OK, Off, Unknown},
	Rows:   {OK, Bad, Held, Lost, None, Stale, Off, Outdated},
}

// Calls is what happens to calls, from the best to the worst for the limits.
type Calls int

// What happens to calls.
const (
	Limited   Calls = iota // limits apply
	Shared                 // each gateway applies its local share of the limits
	Failed                 // calls are answered with 503
	Unlimited              // calls pass without a limit that should have counted them
)

var callsNames = []string{"limited", "shared", "failed", "unlimited"}

// String returns limited, shared, failed or unlimited.
func (c Calls) String() string { return callsNames[c] }

// AllCalls returns all values of Calls.
func AllCalls() []Calls { return []Calls{Limited, Shared, Failed, Unlimited} }

// Condition is the state of one part.
type Condition struct {
	Part  Part
	State string
	Calls Calls
	// Says is the state and what it means for calls, in words. It is the same as long as the condition lasts.
	Says string
	// Why is the cause, and Since is when the state began; both may be zero.
	Why   string
	Since time.Time
}

// Level returns the level at which the condition is logged. A condition in which calls pass that a limit should have counted is never
// logged at INFO.
func (c *Condition) Level() slog.Level {
	switch {
	case c.State == OK:
		return slog.LevelInfo
	case c.Calls == Failed:
		return slog.LevelError
	}
	return slog.LevelWarn
}

// Line returns the condition with its duration and its cause.
func (c *Condition) Line(now time.Time) string {
	text := c.Says
	if !c.Since.IsZero() {
		text += fmt.Sprintf("; for %v", now.Sub(c.Since).Round(time.Second))
	}
	if c.Why != "" {
		text += ": " + c.Why
	}
	return text
}

// Effect returns what happens to calls under all conditions: the worst of them, unless the switch lets every call pass.
func Effect(all []Condition) (worst Calls) {
	for i := range all {
		if all[i].Part == Switch && all[i].Calls == Unlimited {
			return Unlimited
		}
		worst = max(worst, all[i].Calls)
	}
	return worst
}

// OfRedis returns the state of Redis after a probe that took a time and returned err. unneeded is why no call needs Redis; empty if calls do. A
// policy applies to outages alone: a fault that an operator must repair fails calls under every policy.
func OfRedis(err error, took, timeout time.Duration, policy tokenbucket.FailurePolicy, unneeded string) Condition {
	c := Condition{Part: Redis, State: redisState(err, took, timeout)}
	if err != nil {
		c.Why = err.Error()
	}
	if c.State == OK {
		c.Says = "redis: ok"
		return c
	}
	words := map[string]string{Slow: "is slow", Away: "cannot be reached", Hung: "does not reply", Full: "is full", ReadOnly: "is read-only",
		Unable: "cannot serve", Refused: "refuses this gateway"}
	n, share := policy.Instances()
	means := ""
	switch {
	case unneeded != "":
		means = "no call needs it " + unneeded
	case c.State == Slow:
		means = "limits apply, and calls wait for it"
	case c.State == Refused:
		c.Calls, means = Failed, "calls are answered with 503"
	case policy == tokenbucket.FailOpen:
		c.Calls, means = Unlimited, "calls pass without limits (--fail open)"
	case share:
		c.Calls, means = Shared, fmt.Sprintf("calls use this gateway's local share of the limits (--fail share:%d)", n)
	default:
		c.Calls, means = Failed, "calls are answered with 503 (--fail closed)"
	}
	c.Says = "redis " + words[c.State] + ": " + means
	return c
}

func redisState(err error, took, timeout time.Duration) string {
	var reply redis.Error
	switch kind := telemetry.KindOf(err); {
	case err == nil && took > timeout/2:
		return Slow
	case err == nil:
		return OK
	case kind == telemetry.KindTimeout, kind == telemetry.KindDeadline:
		return Hung
	case kind != telemetry.KindUnavailable:
		return Refused
	case strings.Contains(err.Error(), "OOM "):
		return Full
	case strings.Contains(err.Error(), "READONLY "):
		return ReadOnly
	case errors.As(err, &reply) && !errors.As(err, new(net.Error)):
		return Unable
	}
	return Away
}

// OfSwitch returns the state of a switch: whether it is on, as last read, and the error of the last read.
func OfSwitch(on bool, err error) Condition {
	c := Condition{Part: Switch, State: OK, Says: "the switch is on: limits apply"}
	if !on {
		c = Condition{Part: Switch, State: Off, Calls: Unlimited, Says: "the switch is off: every call passes"}
	}
	if err != nil {
		c.State, c.Why = Unknown, err.Error()
		c.Says = "the switch cannot be read, so it stays " + strings.TrimPrefix(c.Says, "the switch is ")
	}
	return c
}

// Table is what a gateway knows about its rows.
type Table struct {
	Limits, Bad, Rejected, Gone, Before int
	Off, Disabled, Outdated             int  // Off: of Gone; Disabled: of Limits
	Held, Pass                          bool // Held: rows that are gone are in force; Pass: calls without a row pass
	Err                                 error
	Lost                                time.Time
}

// OfRows returns the state of the rows, the worst first if there are several.
func OfRows(t Table) Condition {
	c, gone := Condition{Part: Rows}, "gone from the table"
	if t.Pass || t.Off > 0 {
		c.Calls = Unlimited
	}
	if t.Off > 0 {
		gone = "gone from the table, or off"
	}
	switch {
	case t.Gone > 0 && !t.Held:
		c.State, c.Since, c.Says = Lost, t.Lost, fmt.Sprintf("%d of %d limits are %s, and no longer in force", t.Gone, t.Before, gone)
		if t.Limits+t.Bad == 0 {
			c.Says += ": there are no limits"
		}
	case t.Limits+t.Bad == 0:
		c.State, c.Says = None, "there are no limits: --unknown decides about every call"
	case t.Disabled == t.Limits+t.Bad:
		c.State, c.Calls, c.Says = Off, Unlimited, "every limit is off: its calls pass"
	case t.Err != nil:
		c.State, c.Calls, c.Why, c.Says = Stale, Limited, t.Err.Error(), "limits cannot be loaded: the earlier limits stay in force"
	case t.Gone > 0:
		c.State, c.Calls, c.Since = Held, Limited, t.Lost
		c.Says = fmt.Sprintf("%d of %d limits are %s, and still in force", t.Gone, t.Before, gone)
	case t.Outdated > 0:
		c.State, c.Calls, c.Says = Outdated, Limited, fmt.Sprintf("rows are earlier than others that a table has given, which stay in force: %d", t.Outdated)
	case t.Rejected > 0:
		c.State, c.Calls, c.Says = Bad, Limited, fmt.Sprintf("bad rows: %d", t.Rejected)
	default:
		c.State, c.Calls, c.Says = OK, Limited, "rows: ok"
	}
	return c
}

// Problems returns the conditions that are not OK.
func Problems(all []Condition) []Condition {
	return slices.DeleteFunc(slices.Clone(all), func(c Condition) bool { return c.State == OK })
}
