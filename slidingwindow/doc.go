// Package slidingwindow limits how many requests pass in any window of time: "at most 100 in any 60 seconds", whatever their
// timing. A token bucket of that rate refuses bursts that such a quota allows. If the bucket holds 100, up to 200 pass in a minute.
//
// The window is counted in sub-intervals of the resolution r, which begin at multiples of r by the Redis server's clock (of
// this process' without Redis), so that all processes have the same. What a process' own clock says does not matter: it
// only tells how much time has passed since an answer. Memory does not depend on the number of requests.
//
// With a limit L, a window W, P processes, and at most K permits that callers of one process ask for at once, in any window
// of W:
//
//   - Exact admits at most L. The price: what was admitted counts for up to r longer than it must. (A burst at one instant does not.) So
//     at full demand at least L are admitted in every W + r.
//   - Approximate admits at most L + c + (P − 1) × min(L, K), where c is the most that was admitted in one sub-interval. c is added because
//     the sub-interval that the window's edge cuts is taken to have been used evenly. The rest is added because a process knows of the
//     others only what the last answer showed: each process may admit K before it hears more, and its next round trip brings what all have
//     admitted. At the first request in a sub-interval Redis decides, so no answer is used for longer than r.
//
// A clock of a process that runs too fast by the share d (10 s a day are 0.0001) adds d × c. Both are measured in
// benchmarks/slidingwindow/RESULTS.md.
//
// A refusal by what this process knows costs no round trip. It is right as long as the state is in place, the server's clock goes forward,
// and no other process refunds permits or raises the limit. There is one exception: requests of this process that are under way count as
// if they were granted, so a request that fits only if one of them is refused is refused, too. A process notices a change with its next
// answer, at the latest for a request in the next sub-interval. If Redis has lost the state, each process then tells it what it has
// admitted in this window itself, and the limit that it has heard of.
//
// A process runs at most one script for each call that is allowed, and one more in each sub-interval in which calls are refused, to look.
// With several processes there may be more: others may take permits that a process has seen coming free, and then its script is refused.
// With Approximate, Redis also decides calls that come while it is not known whether a permit is free yet: less than a fast round trip.
//
// If the server's clock is up to 2 s behind the latest time seen, time stands still. If it is further behind, what is counted goes back
// with it. If it leaps ahead, it can empty the window once. Processes that give one name and window different resolutions count together,
// each by its own.
package slidingwindow
