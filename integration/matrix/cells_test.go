package matrix

import "strings"

// refusals are the combinations that a typed error refuses, in every world, and why.
var refusals = map[string]string{
	"All + NewQuota":             aloneInGroup,
	"All + SetQuota":             aloneInGroup,
	"All + window and places":    "a row with a window or places is entered by its registry, which asks all of them",
	"Any + window and places":    "a row with a window or places is entered by its registry, which asks all of them",
	"TryAwait + All":             "Group has no TryAwait: the compiler refuses it",
	"TryAwait + Any":             "Choice has no TryAwait: the compiler refuses it",
	"NewQuota + PayLater":        "permits would fall due before they are paid for",
	"PayLater + SetQuota":        "permits would fall due before they are paid for",
	"NewQuota + warm-up":         "a warm-up has no quota: its stored permits are not free",
	"warm-up + SetQuota":         "a warm-up has no quota: its stored permits are not free",
	"NewQuota + SetRate":         "SetQuota changes a quota",
	"NewQuota + SetRateAndBurst": "SetQuota changes a quota",
	"SetRate + SetQuota":         "SetQuota changes a quota",
	"SetRateAndBurst + SetQuota": "SetQuota changes a quota",
	"NewQuota + WithPrefetch":    "a block of a lease, used late, would be a burst",
	"WithPrefetch + SetQuota":    "a block of a lease, used late, would be a burst",
	"PayLater + WithPrefetch":    "permits that are taken ahead must be paid for by the process that takes them",
	"warm-up + WithPrefetch":     "permits that are taken ahead must be paid for by the process that takes them",
	"warm-up + SetRateAndBurst":  "the size of a bucket that warms up follows from its rate: SetRate changes both",
	"Settle down + NewQuota":     oneByOne,
	"Settle down + SetQuota":     oneByOne,
	"SettleLater + NewQuota":     oneByOne,
	"SettleLater + SetQuota":     oneByOne,
}

const (
	aloneInGroup = "a member that is due before the others is used later, so more than the quota's calls would fall into a window"
	oneByOne     = "permits of a quota fall due one at a time, so a request for several has no due time"
)

// known are the cells that do not hold yet, and what mends them. An empty name is any feature.
var known = []struct{ one, other, item string }{}

// isKnown returns what mends a cell, or "".
func isKnown(c *cell) string {
	for _, k := range known {
		if (k.one == "" || c.has(k.one)) && (k.other == "" || c.has(k.other)) {
			return k.item
		}
	}
	return ""
}

// refusal returns why a cell is to be refused, or "".
func refusal(c *cell) string {
	for pair, reason := range refusals {
		one, other, _ := strings.Cut(pair, " + ")
		if c.has(one) && c.has(other) {
			return reason
		}
	}
	return ""
}
