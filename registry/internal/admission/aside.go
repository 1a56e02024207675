package admission

import (
	"context"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// passes lets a call in shadow pass that has found no place, and that would wait for one. It waits in the call's stead: the call would be refused if it had
// no place in time, and otherwise would hold it for as long as it lasts, from then on. So a shadow counts what a row in force would refuse.
// The decision is reported when it is known.
func (a *attempt) passes() *gate.Admission {
	began := time.Now()
	ended := make(chan time.Duration, 1) // how long the call lasted
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), a.PlaceWait+time.Minute) // the store has its own timeout
		var err error
		a.place, err = a.slot.await(ctx, a.bounds, a.env.localShare(a.most), a.PlaceWait)
		refused, err := a.placed(err)
		if refused == nil && err == nil {
			refused, err = a.count(ctx)
		}
		cancel()
		a.passed(refused, err)
		if a.place == nil {
			return
		}
		granted := time.Now()
		time.Sleep(<-ended - time.Since(granted))
		a.place.leave()
	}()
	return &gate.Admission{OK: true, By: gate.ByShadow, Release: sync.OnceFunc(func() { ended <- time.Since(began) })}
}
