package fleet

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A record is the state of a limit in one instance, in three parts:
//
//	120 31 5 0 0 0 4500;3:2 5:3;0 5 2.25 5 7012
//
//	counters   granted, refused, waited, failed, passed, would refuse, microseconds waited
//	waits      place in the histogram:count
//	state      decider, rate in force, stored permits and their maximum; then in milliseconds since the instance started
//	           when it read the bucket and until when a penalty holds; the number of waiters, and since when the oldest waits
//
// Zeros at the end of a part are omitted, and so are empty parts at the end. An empty record is not written.

// deciders are the names of gate.Decider. A record has the index.
var deciders = [...]string{"limit", "switch", "disabled", "zero", "bad_row", "unknown", "shadow", "window", "concurrency", "penalty"}

// ordered returns the counters in the order in which they are written.
func (c *Counters) ordered() [7]int64 {
	return [7]int64{c.Granted, c.Refused, c.Waited, c.Failed, c.Passed, c.WouldRefuse, c.WaitSum.Microseconds()}
}

// appendCounters appends the first part of a record. It is also the format of a base and of a point.
func appendCounters(b []byte, c *Counters) []byte {
	n := c.ordered()
	last := len(n)
	for last > 0 && n[last-1] == 0 {
		last--
	}
	for i, v := range n[:last] {
		if i > 0 {
			b = append(b, ' ')
		}
		b = strconv.AppendInt(b, max(0, v), 10)
	}
	return b
}

// mostMillis is 31 years, more than the life of an instance.
const mostMillis = 1e12

// clock converts times to milliseconds since the instance started.
type clock struct{ began time.Time }

func (k clock) millis(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(max(1, t.Sub(k.began).Milliseconds()))
}

// time is the inverse of millis; zero for 0.
func (k clock) time(millis float64) time.Time {
	if millis == 0 {
		return time.Time{}
	}
	return k.began.Add(time.Duration(millis) * time.Millisecond)
}

// appendRecord appends the record of a limit.
func appendRecord(b []byte, l *Limit, k clock) []byte {
	b = append(appendCounters(b, &l.Counters), ';')
	first := true
	for i, n := range l.Waits {
		if n == 0 {
			continue
		}
		if !first {
			b = append(b, ' ')
		}
		first = false
		b = append(strconv.AppendInt(b, int64(i), 10), ':')
		b = strconv.AppendInt(b, n, 10)
	}
	state := [...]float64{
		float64(max(0, slices.Index(deciders[:], l.Decider))), l.Bucket.Rate, rounded(l.Bucket.Stored), l.Bucket.Max, k.millis(l.Bucket.At),
		k.millis(l.Bucket.HeldUntil), float64(l.Waiting.Count), k.millis(l.Waiting.Since),
	}
	last := len(state)
	for last > 0 && state[last-1] == 0 {
		last--
	}
	b = append(b, ';')
	for i, v := range state[:last] {
		if i > 0 {
			b = append(b, ' ')
		}
		b = strconv.AppendFloat(b, max(0, finite(v)), 'f', -1, 64)
	}
	for len(b) > 0 && b[len(b)-1] == ';' {
		b = b[:len(b)-1]
	}
	return b
}

// finite returns 0 for NaN and infinities.
func finite(f float64) float64 {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return 0
	}
	return f
}

// rounded returns f with three digits after the point, to keep records short.
func rounded(f float64) float64 { return math.Round(f*1000) / 1000 }

var errNumber = errors.New("no number in range")

// numbers parses at most most numbers that are not negative.
func numbers(s string, most int) (all []float64, err error) {
	if s == "" {
		return nil, nil
	}
	parts := strings.Split(s, " ")
	if len(parts) > most {
		return nil, fmt.Errorf("more than %d numbers", most)
	}
	for _, part := range parts {
		n, err := strconv.ParseFloat(part, 64)
		if err != nil || !(n >= 0 && n <= math.MaxFloat32) {
			return nil, errNumber
		}
		all = append(all, n)
	}
	return all, nil
}

// parseCounters is the inverse of appendCounters.
func parseCounters(s string, c *Counters) error {
	if s == "" {
		return nil
	}
	var n [7]int64
	parts := strings.Split(s, " ")
	if len(parts) > len(n) {
		return fmt.Errorf("more than %d counters", len(n))
	}
	for i, part := range parts {
		v, err := strconv.ParseUint(part, 10, 53)
		if err != nil {
			return errNumber
		}
		n[i] = int64(v)
	}
	c.Granted, c.Refused, c.Waited, c.Failed, c.Passed, c.WouldRefuse = n[0], n[1], n[2], n[3], n[4], n[5]
	c.WaitSum = time.Duration(min(n[6], math.MaxInt64/1000)) * time.Microsecond
	return nil
}

// parseRecord is the inverse of appendRecord.
func parseRecord(s string, l *Limit, k clock) error {
	parts := strings.Split(s, ";")
	if len(parts) > 3 {
		return errors.New("more than three parts")
	}
	parts = append(parts, "", "")
	if err := parseCounters(parts[0], &l.Counters); err != nil {
		return err
	}
	if parts[1] != "" {
		for _, pair := range strings.Split(parts[1], " ") {
			place, count, ok := strings.Cut(pair, ":")
			i, err := strconv.ParseUint(place, 10, 8)
			n, err2 := strconv.ParseUint(count, 10, 53)
			if !ok || err != nil || err2 != nil || i >= uint64(len(l.Waits)) {
				return errors.New("no histogram")
			}
			l.Waits[i] = int64(n)
		}
	}
	var state [8]float64
	all, err := numbers(parts[2], len(state))
	if err != nil {
		return err
	}
	copy(state[:], all)
	if state[0] >= float64(len(deciders)) || state[6] > math.MaxInt32 || max(state[4], state[5], state[7]) > mostMillis {
		return errNumber
	}
	l.Decider = deciders[int(state[0])]
	l.Bucket = Bucket{At: k.time(state[4]), Rate: state[1], Stored: state[2], Max: state[3], HeldUntil: k.time(state[5])}
	l.Waiting = Waiting{Count: int(state[6]), Since: k.time(state[7])}
	return nil
}
