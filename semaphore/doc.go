// Package semaphore limits how many things run at once: calls to an upstream that breaks under parallel load, licences, connections.
// [NewMemory] counts for one process. [NewRedis] counts for all processes of a fleet, as does the module postgres.
//
// In a fleet a permit is a lease by the server's clock, which its process renews while the permit is held. If the process dies, the permit
// is free again when the lease ends. A waiter is not granted a permit while its process has been silent for a third of a lease, or for a
// second if that is less. The context of a permit (Permit.Context, and the context that Do passes on) ends before another request can be
// granted in its place. So no more permits are held at once than there are, with two exceptions: work that goes on after its context has
// ended, and a server's clock that leaps forwards by more than two thirds of a lease (see NewRedis). Permit.Fence protects a resource from
// both.
//
// Waiters are served first come, first served, and a request for many permits is not passed by smaller ones. To limit how often things
// begin, rather than how many run, use a rate limiter: package tokenbucket.
package semaphore
