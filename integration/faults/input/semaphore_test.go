package input

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// I2: a value that is no semaphore's is a semaphore.ErrCorruptState, with nothing of the script in it, and is left as it is. A count that
// is no number must neither admit a request nor silently refuse all of them.
func TestI2Semaphore(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t, patient)
	name, base := "", "" // one for each case: a call that was refused may still withdraw its request
	next := func() {
		name = strconv.Itoa(rand.Int())
		base = "semaphore:{" + name + "}:"
	}
	next()
	var wrong []string // all of them, so that one run shows them
	check := func(what, key, field string) {
		value := client.Dump(ctx, key).Val()
		shown := client.HGet(ctx, key, field).Val()
		s, err := semaphore.NewRedis(client, name, 1, semaphore.WithLease(100*time.Millisecond), semaphore.WithStoreTimeout(limit))
		require.NoError(t, err)
		short, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		p, err := s.TryAcquire(short, 1, 0)
		switch {
		case err == nil:
			wrong = append(wrong, what+": admits")
		case errors.Is(err, semaphore.ErrRefused):
			wrong = append(wrong, what+": refuses, as if it were full")
		default:
			require.Nil(t, p, what)
			if !errors.Is(err, semaphore.ErrCorruptState) || !strings.Contains(err.Error(), base) {
				wrong = append(wrong, fmt.Sprintf("%s: %.120v", what, err))
			}
			if strings.Contains(err.Error(), "script") {
				wrong = append(wrong, what+": shows the script")
			}
		}
		if client.Dump(ctx, key).Val() != value {
			wrong = append(wrong, fmt.Sprintf("%s: %q is overwritten by %.40q", what, shown, client.HGet(ctx, key, field).Val()))
		}
		if _, err := s.Holders(short); err != nil && strings.Contains(err.Error(), "script") {
			wrong = append(wrong, what+": Holders shows the script")
		}
		_ = s.Close(short)
		next()
	}
	for _, field := range []string{"fence", "ticket", "used", "permits", "seen", "lives", "busy", "quiet"} {
		for _, value := range []string{"nan", "inf", "-inf", "1e308", "five", ""} {
			require.NoError(t, client.HSet(ctx, base+"state", field, value).Err())
			check(fmt.Sprintf("%s=%q", field, value), base+"state", field)
		}
	}
	for _, field := range []string{"fence", "ticket", "used", "permits"} {
		require.NoError(t, client.HSet(ctx, base+"state", field, "-5").Err())
		check(field+"=-5", base+"state", field)
	}
	for what, permits := range map[string]string{"the number of an older release": "5", "a newer format": "4 5 1"} {
		require.NoError(t, client.HSet(ctx, base+"state", "permits", permits, "seen", 1).Err())
		check(what, base+"state", "permits")
	}
	require.NoError(t, client.HSet(ctx, base+"state", "fence", 1, "seen", 1).Err())
	check("an older release's state", base+"state", "seen")
	for _, key := range []string{"state", "held"} {
		require.NoError(t, client.Set(ctx, base+key, "a string", 0).Err())
		check("a string for "+key, base+key, "")
	}
	require.Empty(t, wrong, "%d things are wrong", len(wrong))
}

// I2: a lock that is no string is an error that names it, with nothing of a script in it, or is replaced like any lock whose token is
// unknown.
func TestI2Lock(t *testing.T) {
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			client := redistest.Start(t).Client(t, patient)
			require.NoError(t, client.RPush(ctx, "tokenbucket:{x}:lock", 1).Err())
			l, err := tokenbucket.NewSmoothBursty("x", 5, tokenbucket.WithStore(store(client)), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			ok, err := l.Try(ctx)
			if err == nil {
				require.True(t, ok)
				return
			}
			require.ErrorIs(t, err, tokenbucket.ErrCorruptState)
			require.ErrorContains(t, err, "tokenbucket:{x}:lock")
			require.NotContains(t, err.Error(), "script")
		})
	}
}

// I2: a window's key that is no string is an error that names it, with nothing of the script in it, and stays, also for a limiter
// that lets pass while Redis is away: Redis is not.
func TestI2Window(t *testing.T) {
	client := redistest.Start(t).Client(t, patient)
	const key = "slidingwindow:{x}:1h0m0s"
	w, err := slidingwindow.New("x", 5, time.Hour, time.Minute, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(limit),
		slidingwindow.WithFailurePolicy(slidingwindow.FailOpen))
	require.NoError(t, err)
	require.NoError(t, client.RPush(ctx, key, 1).Err())
	for range 3 {
		_, err = w.Allow(ctx)
		require.ErrorIs(t, err, slidingwindow.ErrCorruptState)
		require.ErrorContains(t, err, key)
		require.NotContains(t, err.Error(), "script")
	}
	require.Equal(t, []string{"1"}, client.LRange(ctx, key, 0, -1).Val())
}
