package script

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// reply is an error reply of Redis.
type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

// The meaning of a reply depends neither on whether it is of a command or of a script, nor on the wording of the version.
func TestRefusals(t *testing.T) {
	for text, want := range map[string]struct{ cannotServe, notExecuted bool }{
		"READONLY You can't write against a read only replica.":                            {true, true},
		"LOADING Redis is loading the dataset in memory":                                   {true, true},
		"CLUSTERDOWN The cluster is down":                                                  {true, true},
		"TRYAGAIN Multiple keys request during rehashing of slot":                          {true, true},
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": {true, true},
		"NOREPLICAS Not enough good replicas to write.":                                    {true, true},
		"OOM command not allowed when used memory > 'maxmemory'.":                          {true, false},
		"MISCONF Redis is configured to save RDB snapshots, but it's currently unable":     {true, false},
		"BUSY Redis is busy running a script.":                                             {true, false},
		"UNKILLABLE Sorry the script already executed write commands":                      {true, false},
		"ERR max number of clients reached":                                                {true, false},
		"ERR LOADING restoring the db from backup":                                         {true, true}, // KVRocks

		// Redis 7 names the place in the script.
		"READONLY You can't write against a read only replica. script: 6b818461879b7ea953a81ab9ad7aaeca1590b7ab, on @user_script:1.":   {true, true},
		"OOM command not allowed when used memory > 'maxmemory'. script: 6b818461879b7ea953a81ab9ad7aaeca1590b7ab, on @user_script:1.": {true, false},

		// Redis 5 and 6, from redis.call.
		"ERR Error running script (call to f_1028a5dba704e1d8a01fd96efeba25bb78f62df2): @user_script:4: @user_script: 4: -READONLY You can't write against a read only replica. ":                  {true, true},
		"ERR Error running script (call to f_8426c8df41c64d8177dce3ecbbe9146ef3759cd2): @user_script:6: @user_script: 6: -OOM command not allowed when used memory > 'maxmemory'. ":                {true, false},
		"ERR Error running script (call to f_9bd406a64e43e31f0dde2849660e8cd56f340b85): @user_script:2: @user_script: 2: -MISCONF Redis is configured to save RDB snapshots, but is currently not": {true, false},
		"ERR Error running script (call to f_9bd406a64e43e31f0dde2849660e8cd56f340b85): @user_script:2: @user_script: 2: -MISCONF Errors writing to the AOF file: No space left on device ":        {true, false},
		"ERR Error running script (call to f_d05e85801446f5c3b3262aa9928ebf556baf9d64): @user_script:1: @user_script: 1: -NOREPLICAS Not enough good replicas to write. ":                          {true, true},

		// The same, as redis.pcall has it; and Dragonfly.
		"@user_script: 334: -READONLY You can't write against a read only replica.\r\n":                                                                       {true, true},
		"@user_script: 334: -OOM command not allowed when used memory > 'maxmemory'.\r\n":                                                                     {true, false},
		"ERR Error running script (call to d8f2fad9f8e86a53d2a6ebd960b33c4972cacc37): @user_script:2: -READONLY You can't write against a read only replica.": {true, true},

		// Failures that need a repair.
		"WRONGTYPE Operation against a key holding the wrong kind of value":                                                                                                    {},
		"NOPERM this user has no permissions to run the 'evalsha' command":                                                                                                     {},
		"ERR Error running script (call to f_02e4b6c5f49751ef9096706ae82901bb51bf59f2): @user_script:5: WRONGTYPE Operation against a key holding the wrong kind of value":     {},
		"ERR Error running script (call to f_d067a2e509dfa98f9a3cbfe499c8ad2a5226acce): @user_script:1: @user_script: 1: The user executing the script can't run this command": {},
		"ERR Error running script (call to f_d067a2e509dfa98f9a3cbfe499c8ad2a5226acce): out of -READONLY":                                                                      {},
		`CORRUPT "@user_script: 1: -READONLY"`: {},
		"":                                     {},
	} {
		t.Run(text, func(t *testing.T) {
			require.Equal(t, want.cannotServe, CannotServe(text))
			require.Equal(t, want.notExecuted, NotExecuted(reply(text)))
			require.Equal(t, want.notExecuted, NotExecuted(fmt.Errorf("key %q: %w", "x", reply(text))))
			require.False(t, NotExecuted(errors.New(text)), "not a reply of Redis")
		})
	}
	require.False(t, NotExecuted(nil))
}

// An outage is a failure that may end without a repair.
func TestAway(t *testing.T) {
	for _, err := range []error{
		nil, redis.ErrClosed, context.Canceled, reply("NOAUTH Authentication required."), reply("WRONGPASS invalid username-password pair"),
		reply("NOPERM this user has no permissions"), reply("MOVED 5 127.0.0.1:6379"), reply("WRONGTYPE Operation against a key"),
		reply("ERR user_script:32: attempt to index a nil value"), errors.New("what nobody knows"),
		&net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")},
		&net.OpError{Op: "dial", Err: &net.AddrError{Err: "missing port in address", Addr: "redis"}},
		&net.OpError{Op: "dial", Err: net.UnknownNetworkError("tcp9")},
		&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", syscall.EACCES)},
		&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, x509.UnknownAuthorityError{},
		fmt.Errorf("%w: %w", context.DeadlineExceeded, redis.ErrClosed),
	} {
		require.False(t, Away(err), "%v", err)
		require.False(t, Away(fmt.Errorf("x: %w", err)), "%v", err)
	}
	for _, err := range []error{
		context.DeadlineExceeded, os.ErrDeadlineExceeded, io.EOF, io.ErrUnexpectedEOF, redis.ErrPoolTimeout, redis.ErrPoolExhausted,
		&net.OpError{Op: "dial", Err: errors.New("connection refused")}, &net.DNSError{IsNotFound: true},
		reply("LOADING Redis is loading the dataset in memory"), reply("OOM command not allowed"), reply("ERR max number of clients reached"),
		errors.New("redis: all ring shards are down"), errors.New("redis: all sentinels specified in configuration are unreachable"),
	} {
		require.True(t, Away(err), "%v", err)
		require.True(t, Away(fmt.Errorf("x: %w", err)), "%v", err)
	}
}
