// Package semaphore limits how many things run at once: calls to an upstream that breaks under parallel load, licences,
// connections. NewMemory counts for one process, NewRedis for all of a fleet, as does the module postgres.
//
// In a fleet a permit is a lease by the server's clock. Its process renews it while it is held, and one that dies gives its
// place back within the lease; a waiter that dies is not admitted, if it has been silent for a third of a lease, or a second. The context of a permit (Permit.Context, and the one that Do hands over) ends before anybody else
// can be admitted in its place. So never more than the permits are held at once, but for two cases: work that goes on when its
// context has ended, and a server's clock that leaps forwards by more than a lease (see NewRedis). Against both there is
// Permit.Fence, which the resource can check.
//
// Whoever waits is served first come, first served, and a request for many permits is not passed by smaller ones. For how
// often things may begin, rather than how many run, take a rate limiter: package tokenbucket.
package semaphore
