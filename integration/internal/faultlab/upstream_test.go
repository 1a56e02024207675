package faultlab

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Every call of every caller arrives once, and at a time between the call and when it was counted.
func TestUpstream(t *testing.T) {
	u := StartUpstream(t)
	began := Micros()
	var callers sync.WaitGroup
	for range 4 {
		c, err := Dial(u.Addr)
		require.NoError(t, err)
		for range 4 {
			callers.Go(func() {
				for range 50 {
					if err := c.Call(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		defer func() { _ = c.Close() }()
	}
	callers.Wait()
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		if n := u.Count(); n != 800 {
			return fmt.Errorf("%d arrived", n)
		}
		return nil
	}))
	ended := Micros()
	require.Equal(t, 800, u.Between(began, ended+1))
	require.Zero(t, u.Between(0, began))
	require.Zero(t, u.Between(ended+1, 1<<62))
}

// End waits until the callers have hung up, and returns all that they have sent.
func TestUpstreamEnds(t *testing.T) {
	u := StartUpstream(t)
	c, err := Dial(u.Addr)
	require.NoError(t, err)
	require.NoError(t, c.Call())
	require.NoError(t, redistest.Poll(20*time.Second, func() error { // without a wait for a caller that was never accepted
		if u.Count() == 0 {
			return errors.New("nothing has arrived")
		}
		return nil
	}))
	go func() {
		for range 999 {
			time.Sleep(20 * time.Microsecond)
			_ = c.Call()
		}
		_ = c.Close()
	}()
	all := 0
	for _, e := range u.End() {
		all += e.Permits
	}
	require.Equal(t, 1000, all)
	_, err = Dial(u.Addr)
	require.Error(t, err)
}
