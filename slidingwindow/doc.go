// Package slidingwindow limits how many requests pass in any window of time: "at most 100 in any 60 seconds", whatever their timing. A
// token bucket of that rate refuses bursts that such a quota allows, and one that holds 100 lets up to 200 pass in a minute.
//
// The window is counted in sub-intervals of the resolution r. They begin at multiples of r by the Redis server's clock (without Redis, by
// this process's), so they are the same for all processes. The time of day of a process's own clock does not matter: that clock only
// measures how much time has passed since a reply. Memory does not depend on the number of requests.
//
// With a limit L, a window W, P processes, and at most K permits that callers of one process request at once, in any window of W:
//
//   - Exact admits at most L. In exchange, permits count for up to r longer than they must. (A burst at one instant does not.) So at
//     full demand at least L are admitted in every W + r.
//   - Approximate admits at most L + c + (P − 1) × min(L, K), where c is the most that was admitted in one sub-interval. c is added
//     because the permits of the sub-interval that the window's edge cuts are taken to be spread evenly over it. The rest is added
//     because a process knows the permits of the others only from its last reply: each process may admit K before its next reply, which
//     brings the permits that all have admitted. Redis decides the first request in a sub-interval, so no reply is used for longer than
//     r.
//
// A clock of a process that runs too fast by the share d (10 s a day are 0.0001) adds d × c. Both are measured in
// benchmarks/slidingwindow/RESULTS.md.
//
// A refusal from the last reply costs no round trip. It is right as long as the state exists, the server's clock goes forward, and no other
// process refunds permits or raises the limit. There is one exception: requests of this process that are in flight count as granted, so a
// request that fits only if one of them is refused is refused, too. A process notices a change with its next reply, at the latest for a
// request in the next sub-interval. If Redis has lost the state, each process reports to it the permits that it has admitted itself in this
// window, and the limit that it knows.
//
// A process runs at most one script for each call that is allowed, and one more in each sub-interval in which calls are refused. With
// several processes there may be more: others may take permits that a process expects to become free, and then its script is refused. With
// Approximate, Redis also decides calls during the time in which it is uncertain whether a permit is free yet, which is shorter than a fast
// round trip.
//
// If the server's clock is up to 2 s behind the latest time seen, time stands still. If it is further behind, the counts move back with it.
// If it leaps ahead, it can empty the window once. Processes that use one name and window with different resolutions share their counts,
// each in its own sub-intervals.
package slidingwindow
