package store

import (
	"context"
	"errors"
	"fmt"
)

// InSteps applies a batch in several steps, for a [Store] that admits or drops a bounded number of waiters in one step. step decides the
// batch that it is given. If it returns unfinished, everything but Enter is done, and step is called again for the rest. Steps are not
// undone, even if a later one fails.
func (b *Batch) InSteps(step func(*Batch) (r *Report, unfinished bool, err error)) (*Report, error) {
	report, unfinished, err := step(b)
	for err == nil && unfinished {
		rest := *b
		rest.Leave, rest.Renew, rest.SetPermits, rest.AddPermits = nil, nil, 0, 0 // already done
		before := report
		if report, unfinished, err = step(&rest); err == nil && report.Late {
			err = fmt.Errorf("the deadline passed on the way: %w", context.DeadlineExceeded) // not Late: something was done
		} else if partial := (*Partial)(nil); errors.As(err, &partial) {
			err = partial.Err // likewise
		} else if err == nil {
			report.Fresh = report.Fresh || before.Fresh
			if b.PatienceMicros == 0 { // the first step has removed the process
				report.Fresh, report.Notified = before.Fresh, before.Notified
			}
			report.Left, report.Renewed, report.Unchanged = before.Left, before.Renewed, before.Unchanged
			report.Grants = append(before.Grants, report.Grants...)
		}
	}
	if err != nil {
		return nil, err
	}
	return report, nil
}
