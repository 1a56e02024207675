package httplimit

import (
	"math/big"
	"net/http"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var digits = regexp.MustCompile(`\A[0-9]+\z`)

// FuzzRetryAfter compares with numbers of any size and with the three forms of dates that RFC 9110 lists.
func FuzzRetryAfter(f *testing.F) {
	now := time.Date(2026, time.February, 3, 4, 5, 6, 0, time.UTC)
	for _, value := range []string{
		"", "0", "1", "120", "-1", "+1", "1.5", " 7", "00000000000000000007", "4294967295", "4294967296", "99999999999999999999",
		"soon", "Tue, 03 Feb 2026 04:05:36 GMT", "Tuesday, 03-Feb-26 04:05:36 GMT", "Tue Feb  3 04:05:36 2026", "٣",
	} {
		f.Add(value, "Tue, 03 Feb 2026 04:05:30 GMT", int64(time.Minute))
		f.Add(value, "", int64(time.Hour))
	}
	f.Fuzz(func(t *testing.T, value, date string, longest int64) {
		if longest < 0 || longest > int64(time.Hour) {
			return
		}
		h := http.Header{"Retry-After": {value}, "Date": {date}}
		got := retryAfter(h, now, time.Duration(longest))

		want := new(big.Int)
		if digits.MatchString(value) {
			want.SetString(value, 10)
			want.Mul(want, big.NewInt(int64(time.Second)))
		} else if until, ok := naiveDate(value); ok {
			since := now
			if d, ok := naiveDate(date); ok {
				since = d
			}
			want.Sub(nanos(until), nanos(since))
		}
		if want.Sign() < 0 {
			want.SetInt64(0)
		}
		if most := big.NewInt(longest); want.Cmp(most) > 0 {
			want = most
		}
		require.Equal(t, want.Int64(), int64(got))
	})
}

// Of several fields the first valid one counts.
func TestSeveralRetryAfters(t *testing.T) {
	for _, c := range []struct {
		values []string
		want   time.Duration
	}{
		{nil, 0},
		{[]string{"", "7"}, 7 * time.Second},
		{[]string{"soon", "7", "9"}, 7 * time.Second},
		{[]string{"", "soon"}, 0},
		{[]string{"0", "7"}, 0},
	} {
		require.Equal(t, c.want, retryAfter(http.Header{"Retry-After": c.values}, time.Now(), time.Minute), "%q", c.values)
	}
}

func naiveDate(s string) (time.Time, bool) {
	for _, form := range []string{"Mon, 02 Jan 2006 15:04:05 GMT", "Monday, 02-Jan-06 15:04:05 MST", "Mon Jan _2 15:04:05 2006"} {
		if v, err := time.Parse(form, s); err == nil {
			return v, true
		}
	}
	return time.Time{}, false
}

func nanos(t time.Time) *big.Int {
	n := big.NewInt(t.Unix())
	return n.Mul(n, big.NewInt(int64(time.Second))).Add(n, big.NewInt(int64(t.Nanosecond())))
}

// Numbers in header fields: quotas are rounded down to what RFC 9651 allows, waits up to at least a second.
func TestWhole(t *testing.T) {
	require.EqualValues(t, 4, whole(4.999))
	require.EqualValues(t, 0, whole(-1))
	require.Equal(t, int64(999_999_999_999_999), whole(1e300))
	require.EqualValues(t, 1, wholeSeconds(-time.Second))
	require.EqualValues(t, 1, wholeSeconds(0))
	require.EqualValues(t, 1, wholeSeconds(1))
	require.EqualValues(t, 1, wholeSeconds(time.Second))
	require.EqualValues(t, 2, wholeSeconds(time.Second+1))
	require.Equal(t, int64(9_223_372_037), wholeSeconds(1<<63-1))
}
