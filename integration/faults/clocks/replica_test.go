package clocks

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// E5: the master is lost and replaced by its replica, which has all keys, and whose clock differs by half a minute. That is a step of the
// clock: ahead, the bucket forgives its debt and is full, once; behind, nothing is granted in addition, and no caller waits for the half
// minute.
func TestE5SkewedReplica(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]time.Duration{"ahead": 30 * time.Second, "behind": -30 * time.Second} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, stores []string) { failover(t, off, stores) })
		})
	}
}

func failover(t *testing.T, off time.Duration, stores []string) {
	master := redistest.Start(t, "--repl-diskless-sync-delay", "0")
	replica, clock := faultlab.StartStepped(t)
	clock.Set(off)
	old, heir := master.Client(t), replica.Client(t)
	host, port, _ := net.SplitHostPort(master.Addr)
	require.NoError(t, heir.ReplicaOf(background, host, port).Err())
	require.NoError(t, redistest.Poll(20*time.Second, func() error {
		return contains(heir, "master_link_status:up")
	}))
	proxy := faultlab.StartProxy(t, master.Addr)
	r := start(t, proxy.Addr, stores, func(_ int, j *faultlab.Job) { j.StoreTimeout = 0 }) // the default: a probe lasts as long
	r.late.Stop()
	r.late = faultlab.MeasureTrips(t, master.Addr) // past the proxy, which keeps those waiting who come that way
	heirLate := faultlab.MeasureTrips(t, replica.Addr)
	r.last(200*time.Millisecond, 5*time.Second)

	before := micros()
	proxy.Lead("")
	proxy.Reset()
	require.NoError(t, redistest.Poll(20*time.Second, func() error { // in step, so that all is the clock's doing
		have, want := number(old, "master_repl_offset:"), number(heir, "slave_repl_offset:")
		if have == "" || have != want {
			return fmt.Errorf("master is at %s, replica at %s", have, want)
		}
		return nil
	}))
	require.NoError(t, heir.ReplicaOf(background, "no", "one").Err())
	proxy.Lead(replica.Addr)
	after := micros()
	r.goOn(after, 1200*time.Millisecond, 10*time.Second)
	end := micros()
	r.end()
	t.Logf("without a server for %v", time.Duration(after-before)*time.Microsecond)
	r.bit(before, after)
	r.bound("before, of 20", 0, before, burst)
	r.bound("after, of 20", after, always, burst)
	all := burst
	if off > 0 {
		all = 2*burst + rate*timeout.Seconds()
	}
	r.bound(fmt.Sprintf("of %v", all), 0, always, all)
	denied := r.denial(after, end)
	faultlab.Figure(t, "no permit for", denied)
	assert.LessOrEqual(t, denied, most(standstill, r.late.Most(), heirLate.Most(), faultlab.MostWoken(r.told)))
	r.complete(heir)
}

// replication is the server's account of it.
func replication(c clientOf) string { return c.Info(background, "replication").Val() }

func contains(c clientOf, want string) error {
	if text := replication(c); !strings.Contains(text, want) {
		return errors.New(text)
	}
	return nil
}

// number is what follows a name there.
func number(c clientOf, name string) string {
	_, rest, _ := strings.Cut(replication(c), name)
	n, _, _ := strings.Cut(rest, "\r\n")
	return n
}
