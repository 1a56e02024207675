// Package slidingwindow limits how many requests pass in any window of time: "at most 100 in any 60 seconds", whatever their
// timing. A token bucket of that rate refuses bursts that such a quota allows, or, with a bucket of 100, allows up to 200.
//
// The window is counted in sub-intervals of the resolution r, which begin at multiples of r by the Redis server's clock (of
// this process' without Redis), so that all processes have the same. What a process' own clock says does not matter: it
// only tells how much time has passed since an answer. Memory does not depend on the number of requests.
//
// With a limit L, a window W, P processes, and at most K permits that callers of one process ask for at once, in any window
// of W:
//
//   - Exact admits at most L. The price: what was admitted counts for up to r longer than it must, a burst at one instant for
//     not longer at all. So at full demand at least L are admitted in every W + r.
//   - Approximate admits at most L + c + (P − 1) × min(L, K), where c is the most that was admitted in one sub-interval: the
//     first, since the sub-interval that the window's edge cuts is taken to have been used evenly; the second, since others
//     are counted as they were in the last answer. Those K have all been admitted by it, and wait to be told to Redis; its answer
//     brings what all have admitted. At the first request in a sub-interval Redis decides, so nothing is known for longer than r.
//
// A clock of a process that runs too fast by the share d (10 s a day are 0.0001) adds d × c. Both are measured in
// benchmarks/slidingwindow/RESULTS.md.
//
// What is refused by what this process knows costs no round trip. It cannot be wrong while the state is in place, the server's clock
// goes forward and no other process refunds permits or raises the limit, but that a request which only fits if another of this process
// is refused is refused with it. Each process notices such a change with its next answer, at the latest for a request in the next
// sub-interval. When Redis has lost the state, it then tells what it has admitted in this window itself, and the limit that it has heard of.
//
// A process executes at most one script for each call that is allowed, and one look in each sub-interval in which calls are refused. With
// several processes others may take what a process has seen coming free: then its script is refused. With Approximate, Redis also decides
// calls that come within what is unknown of its clock, less than a fast round trip.
//
// A server's clock up to 2 s behind the latest time seen stands still; further behind, what
// is counted goes back with it; ahead, it can empty the window once. Processes that give one name and window another
// resolution count together, each by its own.
package slidingwindow
