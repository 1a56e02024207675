package console

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// texts are the problems of a view, a line each.
func texts(v *view) string {
	var all []string
	for _, p := range v.problems() {
		all = append(all, p.Text)
	}
	return strings.Join(all, "\n")
}

var noon = time.Unix(1_800_000_000, 0)

// unlimited is a fleet of one instance without limits, whose calls without a row have come to that.
func unlimited(at time.Time, c fleet.Counters) *fleet.Snapshot {
	s := counted(at, fleet.Counters{})
	s.Instances[0].Limits = map[string]*fleet.Limit{}
	s.Instances[0].Others = c
	s.Instances[0].Loads = fleet.Loads{Tried: 3}
	return s
}

// Without limits the frame still has its list, the totals have the calls that pass, and a problem states it.
func TestEmptyTable(t *testing.T) {
	source := &told{}
	b := newBoard(source, nil, 2*time.Second)
	source.now = unlimited(noon, fleet.Counters{})
	change, _ := b.read(t.Context())
	require.Contains(t, string(change), `"rows":[]`)
	source.now = unlimited(noon.Add(2*time.Second), fleet.Counters{Passed: 400, Refused: 10})
	_, whole := b.read(t.Context())
	_, text, _ := strings.Cut(string(whole()), "data: ")
	var f frame
	require.NoError(t, json.Unmarshal([]byte(text), &f))
	require.NotNil(t, f.Rows)
	require.Equal(t, totals{Instances: 1, Granted: 200, Refused: 5, Unlimited: 200, UnlimitedRefused: 5, Measured: true,
		Empty: "There are no limits: 200 calls a second pass without one, and 5 are refused."}, f.Totals)
	require.Equal(t, f.Totals.Empty, texts(b.latest))
	require.Equal(t, []notice{{Text: "There are no limits", Calls: "205/s", Tone: "bad", Link: "health"}}, f.Strip)
	require.Equal(t, []float64{200, 5}, []float64{b.latest.instances[0].granted, b.latest.instances[0].refused})
	source.now = counted(noon.Add(4*time.Second), fleet.Counters{})
	b.read(t.Context())
	require.Empty(t, texts(b.latest), "gone when it is over")
}

// Calls without a row are counted beside limits, too.
func TestCallsWithoutARow(t *testing.T) {
	past, now := counted(noon, fleet.Counters{}), counted(noon.Add(10*time.Second), fleet.Counters{Granted: 50})
	now.Instances[0].Others = fleet.Counters{Passed: 1800, Granted: 10, WouldRefuse: 20}
	total := newView(past, now).totals()
	require.Equal(t, []float64{188, 183, 0, 0}, []float64{total.Granted, total.Unlimited, total.Refused, total.UnlimitedRefused})
}

// What a table has lost is a problem that can be confirmed, until no living instance reports it.
func TestLossIsAProblem(t *testing.T) {
	now := counted(noon, fleet.Counters{})
	require.Empty(t, newView(now, now).problems())
	now.Instances[0].Loads = fleet.Loads{Gone: 16, Before: 17, Lost: noon.Add(-90 * time.Second), Names: "/01, /02, …"}
	v := newView(now, now)
	require.Equal(t, []problem{{"16 of 17 limits are gone from the table since 90 s (/01, /02, …), as 1 instance reports. They are no longer in force. " +
		"Restore the rows, or confirm that this is meant.", "confirm"}}, v.problems())
	require.Equal(t, []notice{{Text: "16 of 17 limits are gone from the table for 90 s", Tone: "bad", Link: "health"}}, v.faults())
	now.Instances[0].Loads.Held = 16
	require.Contains(t, texts(newView(now, now)), "still in force")
	require.Equal(t, []notice{{Text: "16 of 17 limits are gone from the table for 90 s, still in force", Tone: "bad", Link: "health"}}, newView(now, now).faults(), "once is enough")
	now.Instances[0].Ended = true
	require.NotContains(t, texts(newView(now, now)), "gone from the table")
}

// An instance that was killed is a problem until another one of its host has begun, one for one.
func TestRestartedInstance(t *testing.T) {
	at := func(id, host string, began, beat time.Duration) fleet.Instance {
		return fleet.Instance{ID: id, Beat: noon.Add(beat), Info: fleet.Info{Host: host, PID: 1, Started: noon.Add(began)}}
	}
	for name, c := range map[string]struct {
		instances []fleet.Instance
		silent    []string
	}{
		"killed":           {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute)}, []string{"a"}},
		"another host":     {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute), at("b", "two", -time.Second, 0)}, []string{"a"}},
		"there before":     {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute), at("b", "one", -2*time.Minute, 0)}, []string{"a"}},
		"restarted":        {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute), at("b", "one", -time.Second, 0)}, nil},
		"two for one":      {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute), at("b", "one", -time.Hour, -time.Minute), at("c", "one", -time.Second, 0)}, []string{"b"}},
		"again and again":  {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute), at("b", "one", -50*time.Second, -40*time.Second), at("c", "one", -time.Second, 0)}, nil},
		"the second, too":  {[]fleet.Instance{at("a", "one", -time.Hour, -time.Minute), at("b", "one", -50*time.Second, -40*time.Second)}, []string{"b"}},
		"without a host":   {[]fleet.Instance{at("a", "", -time.Hour, -time.Minute), at("b", "", -time.Second, 0)}, []string{"a"}},
		"it ended, though": {[]fleet.Instance{{ID: "a", Ended: true, Beat: noon.Add(-time.Minute)}, at("b", "one", -time.Second, 0)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := &fleet.Snapshot{At: noon, Instances: c.instances}
			v := newView(s, s)
			var silent []string
			for i := range v.instances {
				if strings.HasPrefix(v.trouble(&v.instances[i]), "no report for") {
					silent = append(silent, v.instances[i].ID)
				}
			}
			require.Equal(t, c.silent, silent)
			require.Equal(t, len(silent) > 0, slices.ContainsFunc(v.faults(), func(n notice) bool { return strings.HasPrefix(n.Text, "No report from") }))
		})
	}
}

// The persons behind a penalty and the switch are taken from the events.
func TestWhoDidIt(t *testing.T) {
	now := counted(noon, fleet.Counters{})
	now.Instances[0].Limits["x"].Bucket.HeldUntil = noon.Add(20 * time.Second)
	now.Instances[0].Switch = fleet.Switch{Known: true, Off: true, Since: noon.Add(-2450 * time.Millisecond), Read: noon}
	penalty := fleet.Event{At: noon.Add(-10 * time.Second), Kind: fleet.Penalized, Limit: "x", For: 30 * time.Second, Who: "ann", Why: "they ring"}
	off := fleet.Event{At: noon.Add(-2 * time.Second), Kind: fleet.SwitchOff, Who: "bob", Why: "incident 7"}
	v := newView(now, now)
	require.True(t, v.needsEvents())
	v.attribute([]fleet.Event{penalty, off})
	d := v.detail("x")
	require.Equal(t, []any{"by ann: they ring", noon.Add(20 * time.Second).UnixMilli()}, []any{d.HeldBy, d.Held})
	require.Contains(t, string(v.limit("x").figures(v)), `"by ann: they ring"`)
	require.Equal(t, "The switch is off: every call passes (by bob: incident 7).", texts(v))
	require.Contains(t, v.strip(), notice{Text: "x is held back for another 20 s, by ann: they ring", Tone: "bad", Link: "limit?name=x"})
	v.sw.Origin = "at 12:00 by bob: incident 7"
	require.Equal(t, "The switch is off: every call passes (at 12:00 by bob: incident 7).", texts(v), "once is enough")
	require.Equal(t, []string{"held back for 30 s, by ann: they ring", "switched off: every call passes, by bob: incident 7", "held back for 30 s as an upstream asked"},
		[]string{eventText(&penalty), eventText(&off), eventText(&fleet.Event{Kind: fleet.Penalized, For: 30 * time.Second})})
	require.Equal(t, `reset, by a\nn: \u202e`, eventText(&fleet.Event{Kind: fleet.LimitReset, Who: "a\nn", Why: "\u202e"}))
	v.attribute([]fleet.Event{penalty, {Kind: fleet.LimitReset, Limit: "x"}, off, {Kind: fleet.SwitchOn}})
	v.sw.Origin = ""
	require.Empty(t, v.detail("x").HeldBy)
	require.Equal(t, "The switch is off: every call passes.", texts(v))
	quiet := counted(noon, fleet.Counters{})
	require.False(t, newView(quiet, quiet).needsEvents())
}

// What cannot be used until it is repaired is on top of each page and in the strip, with how long, whose it is and how many calls have
// failed, until no living instance reports it.
func TestFaultsAreProblems(t *testing.T) {
	past, now := counted(noon.Add(-10*time.Second), fleet.Counters{}), counted(noon, fleet.Counters{Failed: 50})
	fault := func(limit, bucket, by string, ago time.Duration, calls int64) fleet.Fault {
		return fleet.Fault{Limit: limit, Bucket: bucket, By: by, Err: "corrupt state", Since: noon.Add(-ago), Calls: calls}
	}
	now.Instances[0].Faults = []fleet.Fault{fault("x", "x", "limit", time.Minute, 50)}
	second := fleet.Instance{ID: "j", Beat: noon, Info: fleet.Info{Faults: []fleet.Fault{fault("x", "x", "limit", 3*time.Minute, 70), fault("y", "y|k\n", "window", time.Minute, 1)}}}
	now.Instances = append(now.Instances, second)
	v := newView(past, now)
	require.Equal(t, "x: its bucket cannot be used for 3 min, and 120 calls have failed: corrupt state.\n"+
		`y: its window y|k\n cannot be used for 60 s, and 1 call has failed: corrupt state.`, texts(v))
	require.Equal(t, []notice{
		{Text: "x: its bucket cannot be used for 3 min", Calls: "5/s", Tone: "bad", Link: "limit?name=x", rate: 5},
		{Text: `y: its window y|k\n cannot be used for 60 s`, Tone: "bad", Link: "limit?name=y"},
	}, v.strip(), "the limit is not among those that get no decision, too")
	for i := range 20 {
		name := string(rune('a' + i))
		now.Instances[0].Faults = append(now.Instances[0].Faults, fault(name, name, "concurrency", time.Minute, 2))
	}
	v = newView(past, now)
	require.Contains(t, texts(v), "17 further buckets, windows or concurrencies cannot be used.")
	require.Len(t, v.strip(), mostNamed)
	require.Equal(t, "Further buckets, windows or concurrencies cannot be used", v.strip()[mostNamed-1].Text)
	now.Instances[0].Faults, now.Instances[1].Ended = nil, true
	v = newView(past, now)
	require.Empty(t, texts(v))
	require.Equal(t, "x gets no decision", v.strip()[0].Text)
}

// The strip has since when: the time of the first instance of which it is true, and nothing if that is not known.
func TestStripHasSinceWhen(t *testing.T) {
	now := counted(noon, fleet.Counters{})
	one := func(i fleet.Info) []string {
		i.Host, i.PID, i.Started = "gw", 1, noon.Add(-time.Hour)
		other := i
		other.PID, other.Store.Since, other.Loads.Last = 2, time.Time{}, noon.Add(-time.Second)
		now.Instances = []fleet.Instance{{ID: "a", Beat: noon, Info: i, Limits: now.Instances[0].Limits}, {ID: "b", Beat: noon, Info: other, Limits: now.Instances[0].Limits}}
		var all []string
		for _, n := range newView(now, now).faults() {
			all = append(all, n.Text)
		}
		return all
	}
	require.Equal(t, []string{"Store unavailable for 5 min: gw:1, gw:2"}, one(fleet.Info{Store: fleet.Store{Down: true, Since: noon.Add(-5 * time.Minute)}}))
	require.Equal(t, []string{"Store unavailable: gw:1, gw:2"}, one(fleet.Info{Store: fleet.Store{Down: true}}))
	require.Equal(t, []string{"Loads fail for 4 min, the old limits stay in force: gw:1, gw:2"}, one(fleet.Info{Loads: fleet.Loads{Err: "away", Last: noon.Add(-4 * time.Minute)}}))
	require.Equal(t, []string{"The switch is off for 2 h"}, one(fleet.Info{Switch: fleet.Switch{Known: true, Off: true, Since: noon.Add(-2 * time.Hour), Read: noon}}))
	now.Instances[1].Switch = fleet.Switch{}
	now.Instances[0].Switch = fleet.Switch{}
	now.Instances[1].Beat = noon.Add(-20 * time.Second)
	require.Equal(t, "No report from gw:2 for 20 s", newView(now, now).faults()[0].Text)
}
