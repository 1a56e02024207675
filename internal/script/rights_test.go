package script

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// The error of a script that was refused a command names the command, as Redis does not.
func TestLackingRights(t *testing.T) {
	s := New("local call = redis.call\nlocal t = call('TIME')\nfor i = 1, 2 do send(command, t) end\nsend('ZREM', KEYS[1]) call('SET', KEYS[1], 'x')")
	const refused = "The user executing the script can't run this command or subcommand"
	for text, want := range map[string]string{
		"ERR " + refused + " script: " + s.SHA + ", on @user_script:2.":                                   ": the user of Redis needs +time",
		"ERR Error running script (call to f_" + s.SHA + "): @user_script:4: @user_script: 4: " + refused: ": the user of Redis needs +set +zrem",
		"ERR " + refused + " script: " + s.SHA + ", on @user_script:3.":                                   ": the user of Redis needs all of +set +time +zrem",
		"ERR " + refused + " script: 0000000000000000000000000000000000000000, on @user_script:3.":        ": the user of Redis needs all of +get",
		"redis: ERR " + refused: ": the user of Redis needs all of +get",
		"NOPERM User u has no permissions to run the 'evalsha' command": "",
	} {
		require.EqualError(t, Lacking(errors.New(text), New("return redis.call('GET', KEYS[1])")), text+want)
	}
	require.NoError(t, Lacking(nil))
}
