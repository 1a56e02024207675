package semaphore

import (
	"context"
	"fmt"
)

// InSteps is for a [Backend] that may take several steps for a batch, since thousands are to be admitted or dropped. Step decides what it is
// given, or is unfinished: then all but Enter is done, and it is called again for that. Each step stays done.
func (b *Batch) InSteps(step func(*Batch) (r *Report, unfinished bool, err error)) (*Report, error) {
	report, unfinished, err := step(b)
	for err == nil && unfinished {
		rest := *b
		rest.Leave, rest.Renew, rest.SetPermits, rest.AddPermits = nil, nil, 0, 0 // they are done
		before := report
		if report, unfinished, err = step(&rest); err == nil && report.Late {
			err = fmt.Errorf("the deadline passed on the way: %w", context.DeadlineExceeded) // not Late: something was done
		} else if err == nil {
			report.Fresh = report.Fresh || before.Fresh
			if b.PatienceMicros == 0 { // the first has taken its leave
				report.Fresh, report.Told = before.Fresh, before.Told
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
