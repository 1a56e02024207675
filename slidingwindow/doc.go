// Package slidingwindow limits how many requests pass in any window of time: "at most 100 in any 60 seconds", whatever their timing. A
// token bucket of that rate refuses bursts that such a quota allows, and one that holds 100 lets up to 200 pass in a minute.
//
// The window is counted in sub-intervals of the resolution r. They begin at multiples of r by the Redis server's clock (without Redis, by
// this process's), so they are the same for all processes. The time of day of a process's own clock does not matter: that clock only
// measures how much time has passed since a reply. Memory does not depend on the number of requests.
//
// With a limit L and a window W, at most L permits are admitted in any window of W, by all processes together. In exchange, permits count for
// up to r longer than they must. (A burst at one instant does not.) So at full demand at least L are admitted in every W + r.
//
// A refusal from the last reply costs no round trip. It is right as long as the state exists, the server's clock goes forward, and no other
// process refunds permits or raises the limit. There is one exception: requests of this process that are in flight count as granted, so a
// request that fits only if one of them is refused is refused, too. A process notices a change with its next reply, at the latest for a
// request in the next sub-interval. If Redis has lost the state, each process reports to it the permits that it has admitted itself in this
// window, and the limit that it knows.
//
// A process runs at most one script for each call that is allowed, and one more in each sub-interval in which calls are refused. With
// several processes there may be more: others may take permits that a process expects to become free, and then its script is refused.
//
// If the server's clock is up to 2 s behind the latest time seen, time stands still. If it is further behind, the counts move back with it.
// If it leaps ahead, it can empty the window once. Processes that use one name and window with different resolutions share their counts,
// each in its own sub-intervals.
package slidingwindow
