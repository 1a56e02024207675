// Package semaphore limits how many things run at once: calls to an upstream that breaks under parallel load, licences,
// connections. [NewMemory] counts for one process, [NewRedis] for all of a fleet, as does the module postgres.
//
// In a fleet a permit is a lease by the server's clock. Its process renews it while it is held. If the process dies, the permit is free
// again when the lease ends. A waiter whose process has been silent for a third of a lease, or a second if that is less, is not
// admitted. The context of a permit (Permit.Context, and the one that Do hands over) ends before anybody else can be admitted in its
// place. So never more permits are held at once than there are, with two exceptions: work that goes on when its context has ended, and
// a server's clock that leaps forwards by more than two thirds of a lease (see NewRedis). Against both there is Permit.Fence, which
// the resource can check.
//
// Waiters are served first come, first served, and a request for many permits is not passed by smaller ones. To limit how often things
// begin, rather than how many run, use a rate limiter: package tokenbucket.
package semaphore
