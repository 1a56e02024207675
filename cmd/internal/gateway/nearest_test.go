package gateway

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func TestNearest(t *testing.T) {
	names := []string{"fail", "table", "interval", "store", "store-timeout", "key"}
	for name, want := range map[string]string{
		"fial": "fail?", "tabel": "table?", "intervall": "interval?", "interva": "interval?", "store-timout": "store-timeout?", "ky": "key?",
		"redis": "", "": "", "xyz": "",
	} {
		require.Equal(t, want, nearest("", name, names), name)
	}
}

// The error of a misspelt flag names the flag that was probably meant.
func TestFlagErrors(t *testing.T) {
	for arg, want := range map[string]string{
		"--intervall=2s":                "unknown flag: --intervall: did you mean --interval?",
		"--interval=2":                  `--interval "2": want a duration such as 2s`,
		"--quota=perhaps":               `--quota "perhaps": want true or false`,
		"--nothing=mysql://me:hush@h/d": "unknown flag: --nothing",
		"--max-age=mysql://me:hush@h/d": `--max-age "mysql://xxxxx@h/d": want a duration such as 2s`,
	} {
		flags := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
		for _, g := range new(options).flags() {
			flags.AddFlagSet(g.flags)
		}
		err := flagError(flags, flags.Parse([]string{arg}))
		require.EqualError(t, err, want)
	}
	require.EqualError(t, flagError(pflag.NewFlagSet("", 0), errors.New("plain")), "plain")
}

// A misspelt variable is an error; variables that a cluster sets are ignored.
func TestStrangers(t *testing.T) {
	o, err := given(t, enough, []string{"TOKENBUCKET_FIAL=open", "TOKENBUCKET_SERVICE_HOST=10.0.0.1", "TOKENBUCKET_SERVICE_PORT_HTTP=80", "TOKENBUCKET_PORT=tcp://10.0.0.1:80",
		"TOKENBUCKET_PORT_80_TCP_ADDR=10.0.0.1", "TOKENBUCKET_EMPTY=", "TOKENBUCKET_FAIL=open", "TOKENBUCKET_WHATEVER=hush"}, "")
	require.NoError(t, err)
	c, err := o.parse()
	require.NoError(t, err)
	var log bytes.Buffer
	c.logUnknownVariables(slog.New(slog.NewTextHandler(&log, nil)))
	require.Contains(t, log.String(), `msg="an environment variable is not a setting and is ignored: did you mean TOKENBUCKET_FAIL?" variable=TOKENBUCKET_FIAL`)
	require.Contains(t, log.String(), `msg="an environment variable is not a setting and is ignored" variable=TOKENBUCKET_WHATEVER`)
	require.Equal(t, 2, bytes.Count(log.Bytes(), []byte("WARN")))
	require.NotContains(t, log.String(), "hush")
}

// Of many events of a kind, one is logged in ten seconds, for all.
func TestSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s logLimiter
		told := map[string][]int{}
		for range 1000 {
			for _, kind := range []string{"a", "b"} {
				if n, tell := s.note(kind); tell {
					told[kind] = append(told[kind], n)
				}
			}
			time.Sleep(25 * time.Millisecond)
		}
		require.Equal(t, map[string][]int{"a": {1, 400, 400}, "b": {1, 400, 400}}, told)
		for i := range 5000 {
			s.note(string(rune(i)))
		}
		require.LessOrEqual(t, len(s.kinds), mostKinds)
	})
}
