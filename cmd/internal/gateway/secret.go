package gateway

import (
	"net/url"
	"regexp"
	"strings"
)

// What a password may be in is never printed as it was given, and neither are parsers' errors, which quote it. Where it
// cannot be told for certain what is a password, nothing is shown.

const hidden = "xxxxx"

// hideURL shows scheme, host and path of a URL; what is no URL is shown if it cannot hold a password.
func hideURL(s string) string {
	scheme, rest, isURL := strings.Cut(s, "://")
	switch {
	case !isURL && (strings.ContainsAny(s, "@?") || strings.Contains(s, "=") && s[0] != '/'): // password=hush; but /prefix=host of --upstream
		return hidden
	case !isURL:
		return s
	}
	if prefix, of, ok := strings.Cut(scheme, "="); ok { // of --upstream
		return prefix + "=" + hideURL(of+"://"+rest)
	}
	u, err := url.Parse(s)
	if err != nil || strings.Contains(u.Path+u.RawQuery+u.Fragment, "@") {
		return scheme + "://" + hidden
	}
	shown := scheme + "://"
	if u.User != nil {
		shown += hidden + "@"
	}
	return shown + u.Host + u.Path
}

// hideDSN is hideURL for databases. A file name has no password.
func hideDSN(s string) string {
	if strings.HasPrefix(s, fileScheme) {
		return s
	}
	if path, ok := strings.CutPrefix(s, "sqlite://"); ok {
		path, _, _ = strings.Cut(path, "?")
		return "sqlite://" + path
	}
	return hideURL(s)
}

var userinfo = regexp.MustCompile(`://\S*@`)

// hideUserinfo is for messages of others that quote the command line.
func hideUserinfo(message string) string { return userinfo.ReplaceAllString(message, "://"+hidden+"@") }
