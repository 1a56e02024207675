package store

// Partial is the error of a batch that the store could not decide as a whole now, although it is available: a cluster moves the semaphore to
// another server. What is listed here was decided as in a [Report], and nothing else. The rest is sent again soon.
type Partial struct {
	// Left: an id of Leave that was removed is Holding; the others are Gone.
	Left []Standing
	// Renewed: ids of Renew that were renewed are true.
	Renewed []bool
	// Fresh: the store has no waiters of the process. If it had any, they must enter again. What Left and Renewed show of the other ids is final
	// then; otherwise these ids are sent again.
	Fresh bool
	// Entered are the results of the first of Enter. Those that are Queued, and all others, wait in the process and are sent again.
	Entered []Result
	// Err is why the batch was not decided.
	Err error
}

// Error implements error.
func (p *Partial) Error() string { return p.Err.Error() }

// Unwrap returns Err.
func (p *Partial) Unwrap() error { return p.Err }
