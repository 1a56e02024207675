package gateway

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHide(t *testing.T) {
	for given, want := range map[string]string{
		"localhost:6379":                             "localhost:6379",
		"a:1,b:2":                                    "a:1,b:2",
		":hush@localhost:6379":                       "xxxxx",
		"redis://localhost:6379/1":                   "redis://localhost:6379/1",
		"redis://:hush@localhost:6379/1":             "redis://xxxxx@localhost:6379/1",
		"redis://:hu@sh@localhost:6379":              "redis://xxxxx@localhost:6379",
		"redis://:hu/sh@localhost:6379":              "redis://xxxxx",
		"redis://:hu?sh@localhost:6379":              "redis://xxxxx",
		"redis://me:123?hush@localhost:6379":         "redis://xxxxx",
		"redis+sentinel://h:1?password=hush":         "redis+sentinel://h:1",
		"mysql://me:hush@tcp(db:3306)/limits":        "mysql://xxxxx",
		"mysql://me:hush@db:3306/limits?tls=true":    "mysql://xxxxx@db:3306/limits",
		"postgres://me:%zzhush@db/limits":            "postgres://xxxxx",
		"postgres://db/limits?password=hush&user=me": "postgres://db/limits",
		"sqlite:///var/lib/a@b.db?_pragma=key(hush)": "sqlite:///var/lib/a@b.db",
		"/ibe=http://me:hush@host/base":              "/ibe=http://xxxxx@host/base",
		"host=db user=me password=hush":              "xxxxx",
		"localhost:6379,password=hush":               "xxxxx",
		"/ibe=host:80":                               "/ibe=host:80",
	} {
		require.Equal(t, want, hideDSN(given))
	}
}

// Whatever a password is made of, and however badly it is escaped.
func TestNoPasswordInErrors(t *testing.T) {
	for _, password := range []string{"hush", "hu/hush", "hush#hush", "hush?hush", "hush@hush", "%hush", "hush:hush", "hush hush", "[hush"} {
		for _, flag := range []string{"--limits", "--redis", "--upstream"} {
			for _, url := range []string{
				"mysql://me:P@db/limits?bad=%", "mysql://me:P@tcp(db:x/limits", "postgres://me:P@db:port/limits", "postgres://me:P@db/limits?sslmode=bad",
				"postgres://db/limits?password=P&sslmode=bad", "redis://me:P@h:port", "redis+sentinel://h:1?password=P", "redis+x://me:P@h:1",
				"http://me:P@h/", "/x=http://me:P@h/", "me:P@h:1", "oracle://me:P@h/x",
				"host=db user=me password=P", "h:6379,password=P", "jdbc:mysql://db/limits?user=me&password=P",
			} {
				o, err := given(t, append(append([]string{}, enough...), flag, strings.ReplaceAll(url, "P", password)), nil, "")
				require.NoError(t, err)
				if _, err := o.parse(); err != nil {
					require.NotContains(t, err.Error(), "hush", url)
				}
			}
		}
	}
	for _, file := range []string{"redis: 'hush", "redis: *hush\n", "redis: [hush: hush, hush\n", "hush\n", "interval: {hush: hush}\n", "redis: !!int hush"} {
		o, err := given(t, nil, nil, file)
		if err == nil {
			_, err = o.parse()
		}
		require.Error(t, err)
		require.NotContains(t, err.Error(), "hush", file)
	}
}
