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

// signInError is the refusal of a request whose name or token does not match any user.
type signInError struct {
	*refusal
	user string // as given
}

// Unwrap returns the refusal.
func (e *signInError) Unwrap() error { return e.refusal }

// maxLogged bounds the failed sign-ins logged in any second, so that an attack does not fill the disk.
const maxLogged = 5

// failedSignIns counts failed sign-ins and limits how many are logged.
type failedSignIns struct {
	client httplimit.KeyFunc
	count  atomic.Int64

	mu      sync.Mutex
	logged  [maxLogged]time.Time // when the last ones were logged
	next    int                  // index of the oldest of logged
	omitted int                  // not logged since the last one that was
}

func newFailedSignIns(a *Access) *failedSignIns {
	return &failedSignIns{client: httplimit.ByClient(slices.Concat(a.Proxies, a.Forwarders)...)}
}

// note counts a failed sign-in. It reports whether to log it, and how many before it were not logged.
func (s *failedSignIns) note(now time.Time) (omitted int, log bool) {
	s.count.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.logged[s.next]) < time.Second {
		s.omitted++
		return 0, false
	}
	s.logged[s.next], s.next = now, (s.next+1)%maxLogged
	omitted, s.omitted = s.omitted, 0
	return omitted, true
}

// logFailedSignIn logs a failed sign-in. The name comes from the sender, so it is quoted and cut; it is never a token.
func (c *Console) logFailedSignIn(r *http.Request, e *signInError) {
	omitted, log := c.signIns.note(time.Now())
	if !log {
		return
	}
	c.config.Log.Warn("console: a sign-in failed", "client", c.signIns.client(r), "user", fmt.Sprintf("%.64q", e.user), "why", e.text, "omitted", omitted)
}

// FailedSignIns returns the number of requests whose name or token did not match any user.
func (c *Console) FailedSignIns() int64 { return c.signIns.count.Load() }
