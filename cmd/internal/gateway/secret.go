package gateway

import (
	"net/url"
	"regexp"
	"strings"
)

// Settings that may contain a password are never printed as given, and neither are parsers' errors, which quote them. If it is not certain
// which part is the password, the whole setting is hidden.

const hidden = "xxxxx"

// hideURL reduces a URL to scheme, host and path. It returns other text unchanged if that cannot contain a password.
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

// hideDSN is hideURL for the DSN of a database. A file name contains no password.
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

// hideUserinfo hides user and password of URLs in a message, such as an error of the flag parser that quotes the command line.
func hideUserinfo(message string) string { return userinfo.ReplaceAllString(message, "://"+hidden+"@") }
