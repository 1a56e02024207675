package console

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// Access says who may read and who may write. The zero value: everybody on this machine may read, nobody may write.
//
// A request's Host must be an IP address, localhost or one of Hosts, whoever asks: else a page of somebody else's could have its
// own name point here (DNS rebinding).
type Access struct {
	// Hosts are the names under which the console is asked, without a port, besides localhost and IP addresses.
	Hosts []string
	// Readers are the networks whose requests may read without a name. Empty: this machine. A request that a proxy has passed on is
	// not one of theirs, wherever the proxy runs, as far as it says so: with X-Forwarded-…, Forwarded, X-Real-IP, Via or ProxyHeader.
	Readers []netip.Prefix
	// Users may read from anywhere, and write if they are allowed to: see ParseUsers. They send their name and token as HTTP
	// basic authentication, or the token alone as a bearer token.
	Users []User
	// Proxies are the networks of proxies that know who asks: ProxyHeader of their requests names somebody who may read and write.
	Proxies []netip.Prefix
	// Forwarders are the networks of further proxies whose X-Forwarded-For is believed, in the log alone: it tells from where a failed
	// sign-in came.
	Forwarders []netip.Prefix
	// ProxyHeader is X-Forwarded-User if it is empty.
	ProxyHeader string
	// Key is secret, random or made from a secret by a slow function, at least 16 bytes, and the same at all consoles behind one balancer:
	// then a page that one of them has made can change something at any other. Empty: a random one, so at that one only.
	Key []byte
}

// User is somebody with a token.
type User struct {
	// Name is what the audit says of a change.
	Name string
	// Token is secret: at least 16 bytes.
	Token string
	// Write: changes are allowed.
	Write bool
}

const (
	minToken = 16
	maxUser  = 100
)

// ParseUsers reads a file of users, a line each: "write NAME TOKEN" or "read NAME TOKEN". Empty lines and those that begin with #
// are passed over. No error quotes anything of a line: what stands in the place of a name may be a token.
func ParseUsers(text []byte) ([]User, error) {
	var users []User
	seen := map[string]int{}
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "write" && f[0] != "read" {
			return nil, fmt.Errorf("console: users: line %d: want write or read, a name and a token", i+1)
		}
		u := User{Name: f[1], Token: f[2], Write: f[0] == "write"}
		if err := u.check(); err != nil {
			return nil, fmt.Errorf("console: users: line %d: %w", i+1, err)
		}
		if other := seen[u.Name]; other > 0 {
			return nil, fmt.Errorf("console: users: line %d: the name of line %d: want each name once", i+1, other)
		}
		seen[u.Name] = i + 1
		users = append(users, u)
	}
	return users, nil
}

// check tells what is wrong with a user. It quotes nothing.
func (u *User) check() error {
	switch {
	case u.Name == "" || len(u.Name) > maxUser || strings.ContainsAny(u.Name, ":\x00"):
		return fmt.Errorf("name: want 1 to %d bytes without a colon", maxUser)
	case len(u.Token) < minToken:
		return fmt.Errorf("token of %d bytes: want at least %d", len(u.Token), minToken)
	}
	return nil
}

// caller is who asks.
type caller struct {
	name  string // "" of somebody who only reads from a trusted network
	write bool
}

// gate decides who may come in.
type gate struct {
	Access
	readers []netip.Prefix
	now     func() time.Time
	cross   http.CrossOriginProtection
}

func newGate(a Access) (*gate, error) {
	g := &gate{Access: a, readers: a.Readers, now: time.Now}
	if g.ProxyHeader == "" {
		g.ProxyHeader = "X-Forwarded-User"
	}
	if len(g.readers) == 0 {
		g.readers = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	}
	tokens := map[string]int{}
	for i := range a.Users {
		u := &a.Users[i]
		if err := u.check(); err != nil {
			return nil, fmt.Errorf("console: users: user %d: %w", i+1, err)
		}
		if other := tokens[u.Token]; other > 0 { // a bearer token would not tell who it is
			return nil, fmt.Errorf("console: users: users %d and %d have the same token: want one each", other, i+1)
		}
		tokens[u.Token] = i + 1
	}
	switch {
	case len(g.Key) == 0:
		g.Key = make([]byte, sha256.Size)
		_, err := rand.Read(g.Key)
		return g, err
	case len(g.Key) < minToken:
		return nil, fmt.Errorf("console: key of %d bytes: want at least %d", len(g.Key), minToken)
	}
	return g, nil
}

// refusal is why a request is not answered.
type refusal struct {
	status  int
	text    string
	changes []string // of a row that was changed meanwhile, for the page
}

func (r *refusal) Error() string { return r.text }

// who tells who asks, or why nobody is answered.
func (g *gate) who(r *http.Request) (caller, error) {
	if !KnownHost(r.Host, g.Hosts) {
		return caller{}, &refusal{status: http.StatusMisdirectedRequest, text: fmt.Sprintf(
			"The console is not known under the name %.100q. Ask for it by an IP address or as localhost, or have the name allowed.", r.Host)}
	}
	from, names := address(r.RemoteAddr), r.Header.Values(g.ProxyHeader)
	switch proxy := within(g.Proxies, from); {
	case proxy && len(names) == 1 && names[0] != "" && len(names[0]) <= maxUser: // it may have passed on the password that it asked for
		return caller{name: names[0], write: true}, nil
	case r.Header.Get("Authorization") != "":
		return g.user(r)
	case proxy && len(names) > 0:
		return caller{}, &strangerError{&refusal{status: http.StatusForbidden, text: "The proxy's " + g.ProxyHeader + " is not one name."}, strings.Join(names, ", ")}
	case !proxy && within(g.readers, from) && !g.passedOn(r):
		return caller{}, nil
	}
	if len(g.Users) > 0 {
		return caller{}, &refusal{status: http.StatusUnauthorized, text: "A name and a token are needed."}
	}
	return caller{}, &refusal{status: http.StatusForbidden, text: "The console answers only the networks that it was told to; by default only this machine."}
}

// passedOn tells whether a proxy has taken part, so that the address says nothing of who asks. A header counts whatever it says: before
// the one that a proxy adds, who asks may have sent an empty one.
func (g *gate) passedOn(r *http.Request) bool {
	own := http.CanonicalHeaderKey(g.ProxyHeader)
	for h := range r.Header {
		if strings.HasPrefix(h, "X-Forwarded-") || h == "Forwarded" || h == "X-Real-Ip" || h == "Via" || h == own {
			return true
		}
	}
	return false
}

// user is who has the token. All tokens are compared, so that the time tells nothing.
func (g *gate) user(r *http.Request) (caller, error) {
	name, token, basic := r.BasicAuth()
	if !basic {
		token, _ = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	}
	given, called := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(name))
	var found *User
	said := name
	for i := range g.Users {
		u := &g.Users[i]
		has := sha256.Sum256([]byte(u.Token))
		if subtle.ConstantTimeCompare(given[:], has[:]) == 1 && (!basic || name == u.Name) {
			found = u
		}
		if subtle.ConstantTimeCompare(called[:], has[:]) == 1 { // in the wrong field: it must not be logged
			said = "(a token)"
		}
	}
	if found == nil {
		return caller{}, &strangerError{&refusal{status: http.StatusUnauthorized, text: "This name and token are not known."}, said}
	}
	return caller{name: found.Name, write: found.Write}, nil
}

// KnownHost reports whether a request's Host is an IP address, localhost or one of the names. Any other name could be one that a foreign
// page has had point here (DNS rebinding).
func KnownHost(hostport string, names []string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	for _, h := range names {
		if strings.EqualFold(h, host) {
			return true
		}
	}
	return false
}

func address(remote string) netip.Addr {
	if p, err := netip.ParseAddrPort(remote); err == nil {
		return p.Addr().Unmap()
	}
	return netip.Addr{}
}

func within(networks []netip.Prefix, a netip.Addr) bool {
	for _, n := range networks {
		if n.Contains(a) {
			return true
		}
	}
	return false
}

const forgeryHeader = "X-Csrf-Token"

const forged = "This page is out of date, or the request did not come from it: load it again."

// forgery is the token against forged requests: a page of somebody who may write sends it with each change. It counts for this person,
// today and tomorrow, at each console with the same key. It does not follow from anybody's token: who sees a page cannot try tokens by it.
func (g *gate) forgery(name string, day int64) string {
	m := hmac.New(sha256.New, g.Key)
	fmt.Fprintf(m, "tokenbucket console\n%d\n%s", day, name)
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

func (g *gate) today() int64 { return g.now().Unix() / (24 * 60 * 60) }

// mayWrite tells why a change is refused: the browser must say that it comes from this console's own page, and the page must have
// been made for this person.
func (g *gate) mayWrite(c caller, r *http.Request) error {
	if !c.write {
		if c.name == "" {
			return &refusal{status: http.StatusForbidden, text: "Changes need a name and a token: sign in."}
		}
		return &refusal{status: http.StatusForbidden, text: fmt.Sprintf("%q may read, and not write.", c.name)}
	}
	if err := g.cross.Check(r); err != nil {
		return &refusal{status: http.StatusForbidden, text: forged}
	}
	given := []byte(r.Header.Get(forgeryHeader))
	day := g.today()
	if !hmac.Equal(given, []byte(g.forgery(c.name, day))) && !hmac.Equal(given, []byte(g.forgery(c.name, day-1))) {
		return &refusal{status: http.StatusForbidden, text: forged}
	}
	return nil
}
