package rows

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// There is a fault exactly if a call has failed, and nothing has ended that since, whatever the order of events.
func TestRandomFaults(t *testing.T) {
	buckets, limits := []string{"a", "a:x", "b"}, []string{"rate", "window"}
	row := func(bucket string) string { return bucket[:1] }
	present := func(f *Faults[string, int]) []Fault[string, int] {
		return f.Present(func(*Fault[string, int]) bool { return true })
	}
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		var f Faults[string, int]
		var read Fault[string, int]                // a state that is being read
		failed, ended := [6]int{}, [6]int{}        // when the limits last did
		end := func(n int, is func(at int) bool) { // of limits
			for at := range ended {
				if is(at) {
					ended[at] = n
				}
			}
		}
		for n := 1; n <= 30; n++ {
			now, at := time.Unix(int64(n), 0), r.IntN(6)
			bucket := buckets[at/2]
			switch r.IntN(5) {
			case 0, 1:
				f.Failed(now, row(bucket), bucket, limits[at%2], n)
				failed[at] = n
			case 2:
				f.Passed(bucket)
				end(n, func(i int) bool { return i/2 == at/2 })
			case 3:
				f.Loaded(func(is *Fault[string, int]) bool { return is.Row != row(bucket) })
				end(n, func(i int) bool { return row(buckets[i/2]) == row(bucket) })
			default:
				f.Readable(&read)
				end(n, func(i int) bool { return read.Of > 0 && failed[i] == read.Of })
			}
			var want []string
			for i := range failed {
				if failed[i] > ended[i] {
					want = append(want, buckets[i/2]+" "+limits[i%2])
				}
			}
			var got []string
			for _, is := range present(&f) {
				got = append(got, is.Bucket+" "+is.By)
				if r.IntN(6) == 0 {
					read = is
				}
			}
			require.Equal(t, want, got, "%d: %d", seed, n)
		}
	}
}

// Callers can choose buckets, so that the number of faults that are kept is bounded.
func TestFaultsAreBounded(t *testing.T) {
	var f Faults[string, int]
	for n := range 10 * mostFaults {
		f.Failed(time.Unix(0, 0), "a", fmt.Sprint("a:", n), "rate", n)
	}
	require.Len(t, f.kept, mostFaults)
	f.Failed(time.Unix(1, 0), "a", "a:0", "rate", 7)
	require.Equal(t, 2, f.kept[faulty[string]{"a:0", "rate"}].Calls)
}
