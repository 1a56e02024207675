// Package upgrade runs the previous release and this one side by side, as a fleet does while it is updated or put back, on one Redis, one
// MariaDB and one PostgreSQL. What may run beside what, and the figures of these tests, are in docs/upgrading.md.
package upgrade

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

func TestMain(m *testing.M) {
	worker.Main(task.Env, task.Run)
	faultlab.Parallel(4)
	redistest.Main(m, dbtest.StopShared, func() { _ = os.RemoveAll(build.dir) })
}

// patience is how long a test waits for a process; a call of a process may take a minute.
const patience = 3 * time.Minute

// release is one of the two that run beside each other.
type release int

const (
	previous release = iota // previous/source.tar.gz
	now                     // this checkout
)

func (r release) String() string { return [...]string{"previous", "now"}[r] }

// other returns the other release.
func (r release) other() release { return now - r }

// start starts a process of a release. It does not outlive the test.
func (r release) start(t testing.TB, job task.Job) *worker.Worker[task.Event] {
	t.Helper()
	if r == now {
		return worker.Start[task.Event](t, task.Env, job)
	}
	build.once.Do(func() { build.path, build.err = buildPrevious() })
	require.NoError(t, build.err, "the worker of the previous release")
	return worker.StartProgram[task.Event](t, build.path, task.Env, job)
}

// build is the worker of the previous release, built once.
var build struct {
	once      sync.Once
	dir, path string
	err       error
}

// shared has the files of this module that are compiled with the previous release.
var shared = []string{"internal/worker", "upgrade/task", "upgrade/worker"}

// buildPrevious unpacks the source of the previous release, adds the worker, and compiles that with the dependencies of the previous release.
func buildPrevious() (string, error) {
	dir, err := os.MkdirTemp("", "upgrade")
	if err != nil {
		return "", err
	}
	build.dir = dir
	if err := unpack("previous/source.tar.gz", dir); err != nil {
		return "", err
	}
	for _, part := range shared {
		files, err := filepath.Glob(filepath.Join("..", part, "*.go"))
		if err != nil {
			return "", err
		}
		into := filepath.Join(dir, "integration", part)
		if err := os.MkdirAll(into, 0o755); err != nil {
			return "", err
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			if err := os.WriteFile(filepath.Join(into, filepath.Base(file)), text, 0o644); err != nil {
				return "", err
			}
		}
	}
	path := filepath.Join(dir, "worker")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-tags=previous", "-o", path, "./upgrade/worker")
	cmd.Dir = filepath.Join(dir, "integration")
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK="+filepath.Join(dir, "go.work"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

// unpack extracts the regular files of a compressed archive.
func unpack(archive, dir string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	plain, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for files := tar.NewReader(plain); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if !filepath.IsLocal(h.Name) {
			return fmt.Errorf("%s: %s leads out of the archive", archive, h.Name)
		}
		text, err := io.ReadAll(files)
		if err != nil {
			return err
		}
		path := filepath.Join(dir, h.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
}

// history has the events of a fleet's processes while they were replaced.
type history struct {
	used [2][]task.Event // by release
	late []faultlab.Span // in which some process was woken too late
	// full is the time in which as many processes were at work as the fleet has, or one more.
	full faultlab.Span
}

// roll replaces the processes of a fleet, one by one, by processes of the other release with the same jobs. A process is ended once its
// successor has had a number of permits in each of its tasks. Any failed call fails the test.
func roll(t *testing.T, from release, permits int, jobs ...task.Job) *history {
	t.Helper()
	var h history
	var processes []*worker.Worker[task.Event]
	var releases []release
	start := func(r release, j task.Job) *worker.Worker[task.Event] {
		p := r.start(t, j)
		processes, releases = append(processes, p), append(releases, r)
		return p
	}
	fleet := make([]*worker.Worker[task.Event], len(jobs))
	for i, j := range jobs {
		fleet[i] = start(from, j)
	}
	for i, j := range jobs {
		await(t, from, fleet[i], j, permits)
	}
	h.full.From = task.Micros()
	for i, j := range jobs {
		successor := start(from.other(), j)
		await(t, from.other(), successor, j, permits)
		fleet[i].End()
		fleet[i] = successor
	}
	h.full.To = task.Micros()
	var ending sync.WaitGroup
	for _, p := range fleet {
		ending.Go(func() { p.End() })
	}
	ending.Wait()
	for i, p := range processes {
		for _, e := range p.Events() {
			switch e.What {
			case task.Failed:
				t.Errorf("%s: a process of the release %s failed: %s", e.Of, releases[i], e.Text)
			case task.Used:
				h.used[releases[i]] = append(h.used[releases[i]], e)
			case task.Late:
				h.late = append(h.late, faultlab.Span{From: e.From, To: e.To})
			}
		}
	}
	return &h
}

// await waits until a process has taken the given number of permits in each of its tasks.
func await(t *testing.T, r release, p *worker.Worker[task.Event], job task.Job, permits int) {
	t.Helper()
	require.NoError(t, redistest.Poll(patience, func() error {
		had := map[string]int{}
		for _, e := range p.Events() {
			if e.What == task.Failed {
				require.FailNow(t, "a call failed", "%s of the release %s: %s", e.Of, r, e.Text)
			}
			had[e.Of] += e.Permits
		}
		for _, j := range job.Tasks {
			if had[j.Name] < permits {
				return fmt.Errorf("%s: %d permits of %d", j.Name, had[j.Name], permits)
			}
		}
		return nil
	}))
}

// spans returns the permits of a task, one span each, and how many of them each release had.
func (h *history) spans(name string) (all []faultlab.Span, by [2]int) {
	for r, events := range h.used {
		for _, e := range events {
			if e.Of == name {
				by[r] += e.Permits
				all = append(all, slices.Repeat([]faultlab.Span{{From: e.From, To: e.To}}, e.Permits)...)
			}
		}
	}
	return all, by
}

// awake returns the time, in seconds, in which the whole fleet was at work and no process was woken too late.
func (h *history) awake() float64 {
	slices.SortFunc(h.late, func(a, b faultlab.Span) int { return int(a.From - b.From) })
	at, sum := h.full.From, int64(0)
	for _, l := range h.late {
		sum += max(0, min(l.From, h.full.To)-at)
		at = max(at, min(l.To, h.full.To))
	}
	return float64(sum+h.full.To-at) / 1e6
}

// within counts the spans that end while the whole fleet was at work.
func (h *history) within(spans []faultlab.Span) (n int) {
	for _, s := range spans {
		if h.full.From <= s.To && s.To < h.full.To {
			n++
		}
	}
	return n
}

// fullyUsed fails the test if a bucket at full demand granted less than 97 % of its rate, counted in the time in which no process was late.
func (h *history) fullyUsed(t *testing.T, bucket string, rate float64) {
	t.Helper()
	all, _ := h.spans(bucket)
	had, seconds, awake := h.within(all), float64(h.full.To-h.full.From)/1e6, h.awake()
	t.Logf("%s: %d permits in %.2f s: %.1f %% of the rate; no process was late in %.2f s of them",
		bucket, had, seconds, 100*float64(had)/(rate*seconds), awake)
	require.GreaterOrEqual(t, float64(had)/(rate*awake), 0.97, "the part of the rate that was used")
}

// directions are both ways in which a fleet changes its release.
func directions(t *testing.T, test func(t *testing.T, from release)) {
	for _, from := range []release{previous, now} {
		t.Run(fmt.Sprintf("%s to %s", from, from.other()), func(t *testing.T) {
			t.Parallel()
			test(t, from)
		})
	}
}
