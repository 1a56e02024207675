package console

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// strangerError is a refusal of somebody who has said who he is, and is not known by that.
type strangerError struct {
	*refusal
	user string // as given
}

// Unwrap returns the refusal.
func (e *strangerError) Unwrap() error { return e.refusal }

// mostTold is how many failed sign-ins are logged in any second: who tries tokens must not fill the disk.
const mostTold = 5

// strangers tells of sign-ins that have failed.
type strangers struct {
	client httplimit.KeyFunc
	count  atomic.Int64

	mu      sync.Mutex
	told    [mostTold]time.Time // the last ones
	next    int                 // of told, the oldest
	omitted int                 // since then
}

func newStrangers(a *Access) *strangers {
	return &strangers{client: httplimit.ByClient(slices.Concat(a.Proxies, a.Forwarders)...)}
}

// note counts one, and tells whether to log it, and how many were not logged before it.
func (s *strangers) note(now time.Time) (omitted int, tell bool) {
	s.count.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.told[s.next]) < time.Second {
		s.omitted++
		return 0, false
	}
	s.told[s.next], s.next = now, (s.next+1)%mostTold
	omitted, s.omitted = s.omitted, 0
	return omitted, true
}

// tellStranger logs a failed sign-in. What was given as the user is anybody's text: it is quoted and cut, and no token.
func (c *Console) tellStranger(r *http.Request, e *strangerError) {
	omitted, tell := c.strangers.note(time.Now())
	if !tell {
		return
	}
	c.config.Log.Warn("console: a sign-in failed", "client", c.strangers.client(r), "user", fmt.Sprintf("%.64q", e.user), "why", e.text, "omitted", omitted)
}

// FailedSignIns is how many requests came with a name or a token that is not known.
func (c *Console) FailedSignIns() int64 { return c.strangers.count.Load() }
