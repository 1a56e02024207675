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

// Access decides which requests may read and which may write. With the zero value, this machine may read and no request may
// write.
//
// The Host of every request must be an IP address, localhost or one of Hosts. Otherwise a foreign page could let a name of
// its own resolve to the console (DNS rebinding).
type Access struct {
	// Hosts are further names of the console, without a port.
	Hosts []string
	// Readers are the networks whose requests may read without a name; if empty, this machine only. A request that came
	// through a proxy is not one of them, wherever the proxy runs. A proxy is recognised by the headers X-Forwarded-…,
	// Forwarded, X-Real-IP, Via or ProxyHeader.
	Readers []netip.Prefix
	// Users may read from any address, and write if their entry allows it: see ParseUsers. They send name and token as HTTP
	// basic authentication, or the token alone as a bearer token.
	Users []User
	// Proxies are the networks of authenticating proxies. The user that such a proxy names in ProxyHeader may read and write.
	Proxies []netip.Prefix
	// Forwarders are the networks of further proxies whose X-Forwarded-For is trusted, for logging the client of a failed
	// sign-in only.
	Forwarders []netip.Prefix
	// ProxyHeader names the user of a request from Proxies; X-Forwarded-User if empty.
	ProxyHeader string
	// Key signs the tokens against forged requests. It is secret, random or derived from a secret by a slow function, and at
	// least 16 bytes long. Consoles behind one load balancer need the same Key, or a page from one cannot change anything at
	// another. If empty, a random key is made.
	Key []byte
}

// User is a person or program with a token.
type User struct {
	// Name is recorded in the audit of each change.
	Name string
	// Token is the secret, at least 16 bytes.
	Token string
	// Write allows changes.
	Write bool
}

const (
	minToken = 16
	maxUser  = 100
)

// ParseUsers parses a file of users with a line each: "write NAME TOKEN" or "read NAME TOKEN". Empty lines and lines that
// begin with # are ignored. Errors never quote the line, because the field in the name's place may be a token.
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

// check returns the error in a user's fields, without quoting any of them.
func (u *User) check() error {
	switch {
	case u.Name == "" || len(u.Name) > maxUser || strings.ContainsAny(u.Name, ":\x00"):
		return fmt.Errorf("name: want 1 to %d bytes without a colon", maxUser)
	case len(u.Token) < minToken:
		return fmt.Errorf("token of %d bytes: want at least %d", len(u.Token), minToken)
	}
	return nil
}

// principal is the authenticated sender of a request.
type principal struct {
	name  string // empty for a request from a trusted network, which may only read
	write bool
	token bool // the browser sends a name and a token, so the user can sign out
}

// authenticator identifies the sender of each request and decides what it may do.
type authenticator struct {
	Access
	readers []netip.Prefix
	now     func() time.Time
	cross   http.CrossOriginProtection
}

func newAuthenticator(access Access) (*authenticator, error) {
	a := &authenticator{Access: access, readers: access.Readers, now: time.Now}
	if a.ProxyHeader == "" {
		a.ProxyHeader = "X-Forwarded-User"
	}
	if len(a.readers) == 0 {
		a.readers = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	}
	tokens := map[string]int{}
	for i := range access.Users {
		u := &access.Users[i]
		if err := u.check(); err != nil {
			return nil, fmt.Errorf("console: users: user %d: %w", i+1, err)
		}
		if other := tokens[u.Token]; other > 0 { // a bearer token must identify one user
			return nil, fmt.Errorf("console: users: users %d and %d have the same token: want one each", other, i+1)
		}
		tokens[u.Token] = i + 1
	}
	switch {
	case len(a.Key) == 0:
		a.Key = make([]byte, sha256.Size)
		_, err := rand.Read(a.Key)
		return a, err
	case len(a.Key) < minToken:
		return nil, fmt.Errorf("console: key of %d bytes: want at least %d", len(a.Key), minToken)
	}
	return a, nil
}

// refusal is the error of a request that is not served, with its HTTP status.
type refusal struct {
	status  int
	text    string
	at      time.Time // in text, as figure.Clock; zero if there is none
	field   string    // of the request that is missing or wrong; empty if it is none
	changes []string  // in the row since the page was made, for the error's details
}

func (r *refusal) Error() string { return r.text }

// identify returns the sender of a request, or a refusal.
func (a *authenticator) identify(r *http.Request) (principal, error) {
	if !KnownHost(r.Host, a.Hosts) {
		return principal{}, &refusal{status: http.StatusMisdirectedRequest, text: fmt.Sprintf(
			"The console is not known under the name %.100q. Ask for it by an IP address or as localhost, or have the name allowed.", r.Host)}
	}
	from, names := address(r.RemoteAddr), r.Header.Values(a.ProxyHeader)
	switch proxy := within(a.Proxies, from); {
	case proxy && len(names) == 1 && names[0] != "" && len(names[0]) <= maxUser: // an Authorization header beside it may be the password that the proxy asked for
		return principal{name: names[0], write: true}, nil
	case r.Header.Get("Authorization") != "":
		return a.byToken(r)
	case proxy && len(names) > 0:
		return principal{}, &signInError{&refusal{status: http.StatusForbidden, text: "The proxy's " + a.ProxyHeader + " is not one name."}, strings.Join(names, ", ")}
	case !proxy && within(a.readers, from) && !a.forwarded(r):
		return principal{}, nil
	}
	if len(a.Users) > 0 {
		return principal{}, &refusal{status: http.StatusUnauthorized, text: "A name and a token are needed."}
	}
	return principal{}, &refusal{status: http.StatusForbidden, text: "This address may not read the console. By default only this machine may; the option for readers names other networks."}
}

// forwarded reports whether the request came through a proxy, so that its address does not identify the sender. Any such
// header counts, also an empty one: the sender may have added it before the proxy added its own.
func (a *authenticator) forwarded(r *http.Request) bool {
	own := http.CanonicalHeaderKey(a.ProxyHeader)
	for h := range r.Header {
		if strings.HasPrefix(h, "X-Forwarded-") || h == "Forwarded" || h == "X-Real-Ip" || h == "Via" || h == own {
			return true
		}
	}
	return false
}

// byToken returns the user with the request's token. All tokens are compared in constant time, so that timing reveals
// nothing.
func (a *authenticator) byToken(r *http.Request) (principal, error) {
	name, token, basic := r.BasicAuth()
	if !basic {
		token, _ = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	}
	given, called := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(name))
	var found *User
	logName := ""
	if name != "" {
		logName = fmt.Sprintf("(no user's name, %d bytes)", len(name)) // it may be a token, or contain one
	}
	for i := range a.Users {
		u := &a.Users[i]
		has := sha256.Sum256([]byte(u.Token))
		if subtle.ConstantTimeCompare(given[:], has[:]) == 1 && (!basic || name == u.Name) {
			found = u
		}
		if subtle.ConstantTimeCompare(called[:], has[:]) == 1 {
			logName = "(a token)"
		}
		if name == u.Name && logName != "(a token)" {
			logName = name
		}
	}
	if found == nil {
		return principal{}, &signInError{&refusal{status: http.StatusUnauthorized, text: "There is no user with this name and token."}, logName}
	}
	return principal{name: found.Name, write: found.Write, token: basic}, nil
}

// KnownHost reports whether a request's Host is an IP address, localhost or one of the names. A foreign page could let any
// other name resolve to this server (DNS rebinding).
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

// forgery returns the token against forged requests, which a page sends with each change. It is valid for one user, today and
// tomorrow, at every console with the same Key. It does not depend on the user's own token, so it cannot be used to guess
// that.
func (a *authenticator) forgery(name string, day int64) string {
	m := hmac.New(sha256.New, a.Key)
	fmt.Fprintf(m, "tokenbucket console\n%d\n%s", day, name)
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

func (a *authenticator) today() int64 { return a.now().Unix() / (24 * 60 * 60) }

// mayWrite returns a refusal unless the user may write and the request comes from a page of this console that was made for
// this user.
func (a *authenticator) mayWrite(p principal, r *http.Request) error {
	if !p.write {
		if p.name == "" {
			return &refusal{status: http.StatusForbidden, text: "Changes need a name and a token: sign in."}
		}
		return &refusal{status: http.StatusForbidden, text: fmt.Sprintf("%q may only read. Changes need a user with the right to write.", p.name)}
	}
	if err := a.cross.Check(r); err != nil {
		return &refusal{status: http.StatusForbidden, text: forged}
	}
	given := []byte(r.Header.Get(forgeryHeader))
	day := a.today()
	if !hmac.Equal(given, []byte(a.forgery(p.name, day))) && !hmac.Equal(given, []byte(a.forgery(p.name, day-1))) {
		return &refusal{status: http.StatusForbidden, text: forged}
	}
	return nil
}
