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
	user string // the name of a user, or a description of the text in its place
}

// Unwrap returns the refusal.
func (e *signInError) Unwrap() error { return e.refusal }

// maxLogged bounds the lines of one kind that are logged in any second, so that an attack does not fill the disk.
const maxLogged = 5

// failedSignIns counts failed sign-ins and limits how many are logged.
type failedSignIns struct {
	client httplimit.KeyFunc
	count  atomic.Int64
	lines  lineLimit
}

// lineLimit bounds the lines of one kind in the log. The zero value is ready for use by several goroutines.
type lineLimit struct {
	mu      sync.Mutex
	logged  [maxLogged]time.Time // when the last ones were logged
	next    int                  // index of the oldest of logged
	omitted int                  // not logged since the last one that was
}

func newFailedSignIns(a *Access) *failedSignIns {
	return &failedSignIns{client: httplimit.ByClient(slices.Concat(a.Proxies, a.Forwarders)...)}
}

// note reports whether to log a line now, and how many before it were not logged.
func (s *lineLimit) note(now time.Time) (omitted int, log bool) {
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

// logFailedSignIn counts and logs a failed sign-in. A name that is no user's is not logged, because a token may be in its place.
func (c *Console) logFailedSignIn(r *http.Request, e *signInError) {
	c.signIns.count.Add(1)
	omitted, log := c.signIns.lines.note(time.Now())
	if !log {
		return
	}
	c.config.Log.Warn("console: a sign-in failed", "client", c.signIns.client(r), "user", fmt.Sprintf("%.64q", e.user), "why", e.text, "omitted", omitted)
}

// FailedSignIns returns the number of requests whose name or token did not match any user.
func (c *Console) FailedSignIns() int64 { return c.signIns.count.Load() }

// logRefusedWrite logs a request that may not change anything, or whose body cannot be used. A sender without a right can send
// any number of them.
func (c *Console) logRefusedWrite(r *http.Request, what string, user principal, err error) {
	if omitted, log := c.refusedWrites.note(time.Now()); log {
		c.config.Log.Warn("console: change refused", "what", what, "who", user.name, "client", c.signIns.client(r), "error", err, "omitted", omitted)
	}
}
