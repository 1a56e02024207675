package fairness

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// Two tenants with weights 3 and 1 have callers in each process, many more than fit the look-ahead. Their parts are 3 : 1 within 2 %, in one
// process and in four, and the whole rate is used.
func TestTenantsByWeight(t *testing.T) {
	t.Parallel()
	const rate = 200.0
	for _, processes := range []int{1, 4} {
		t.Run(fmt.Sprintf("%d processes", processes), func(t *testing.T) {
			t.Parallel()
			var jobs []faultlab.Job
			for range processes {
				j := mixed(rate, 600)
				j.Tenants = []int{3, 1}
				jobs = append(jobs, j)
			}
			f := start(t, jobs...)
			lasts := faultlab.Lasting(20*time.Second, time.Minute)
			time.Sleep(3*time.Second + lasts)
			told := f.end()
			from := f.began + (3 * time.Second).Microseconds()
			each, share := f.used(told, from, lasts)
			var parts [2]float64
			for _, p := range slices.Concat(told...) {
				if p.Used >= from && p.Used < from+lasts.Microseconds() && p.Err == "" {
					parts[p.Tenant] += float64(p.Permits)
				}
			}
			t.Logf("permits of the processes %v, of the tenants %v", each, parts)
			faultlab.Figure(t, "% of the rate", 100*share)
			faultlab.Figure(t, "of the tenants, 3 : 1", parts[0]/parts[1])
			require.InEpsilon(t, 3, parts[0]/parts[1], 0.02)
			require.GreaterOrEqual(t, share, 0.98)
		})
	}
}
