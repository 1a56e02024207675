package console_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// viewer is a browser's end of a stream. One that is stuck takes nothing.
type viewer struct {
	stuck bool

	mu       sync.Mutex
	header   http.Header
	status   int
	text     bytes.Buffer
	deadline time.Time
}

func (v *viewer) Header() http.Header {
	if v.header == nil {
		v.header = http.Header{}
	}
	return v.header
}

func (v *viewer) WriteHeader(status int) { v.status = status }
func (v *viewer) Flush()                 {}

func (v *viewer) SetWriteDeadline(t time.Time) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.deadline = t
	return nil
}

func (v *viewer) Write(b []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.stuck {
		if v.deadline.IsZero() {
			select {}
		}
		time.Sleep(time.Until(v.deadline))
		return 0, os.ErrDeadlineExceeded
	}
	return v.text.Write(b)
}

func (v *viewer) events(name string) int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return strings.Count(v.text.String(), "event: "+name+"\n")
}

// look opens a stream, and returns what closes it. gone is closed when the console has ended it.
func look(c http.Handler, path string, v *viewer) (leave func(), gone chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	gone = make(chan struct{})
	go func() {
		defer close(gone)
		c.ServeHTTP(v, local("GET", path).WithContext(ctx))
	}()
	return cancel, gone
}

// The fleet is read once per beat, whatever the number of viewers, and not at all without viewers.
func TestManyViewersShareOneReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := fleettest.Example()
		c := newConsole(t, console.Config{Source: source})
		viewers := make([]*viewer, 1000)
		var leave []func()
		for i := range viewers {
			viewers[i] = &viewer{}
			stop, _ := look(c, "/stream", viewers[i])
			leave = append(leave, stop)
		}
		time.Sleep(20*time.Second + 100*time.Millisecond)
		require.LessOrEqual(t, source.Asked(), 11)
		for _, v := range viewers {
			require.GreaterOrEqual(t, v.events("all"), 1)
			require.GreaterOrEqual(t, v.events("all")+v.events("some"), 10)
			require.Equal(t, "text/event-stream", v.header.Get("Content-Type"))
		}
		for _, stop := range leave {
			stop()
		}
		time.Sleep(2 * time.Minute)
		asked := source.Asked()
		time.Sleep(time.Hour)
		require.Equal(t, asked, source.Asked(), "nobody looks any more")
		c.Close()
	})
}

// A stuck viewer is dropped, and delays no other.
func TestStuckViewerIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConsole(t, console.Config{})
		stuck, well := &viewer{stuck: true}, &viewer{}
		_, dropped := look(c, "/stream", stuck)
		leave, _ := look(c, "/stream", well)
		began := time.Now()
		<-dropped
		require.LessOrEqual(t, time.Since(began), 6*time.Second)
		time.Sleep(10 * time.Second)
		require.GreaterOrEqual(t, well.events("all")+well.events("some"), 7)
		leave()
		c.Close()
	})
}

// A stream ends by itself, and there are no more of them than may be.
func TestStreamsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConsole(t, console.Config{MaxStreams: 2, StreamTime: time.Minute})
		_, first := look(c, "/stream", &viewer{})
		_, second := look(c, "/stream/limit?name=%2Fibe%2FAvailFare", &viewer{})
		time.Sleep(time.Second)
		third := &viewer{}
		_, refused := look(c, "/stream/health", third)
		<-refused
		require.Equal(t, http.StatusServiceUnavailable, third.status)
		require.NotEmpty(t, third.header.Get("Retry-After"))
		began := time.Now()
		<-first
		<-second
		require.LessOrEqual(t, time.Since(began), time.Minute)
		again := &viewer{}
		leave, _ := look(c, "/stream/health", again)
		time.Sleep(time.Second)
		require.Equal(t, 1, again.events("health"))
		leave()
		c.Close()
	})
}

// Close ends all streams, at once.
func TestCloseEndsStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newConsole(t, console.Config{})
		_, a := look(c, "/stream", &viewer{})
		_, b := look(c, "/stream/limit?name=x", &viewer{})
		time.Sleep(time.Second)
		began := time.Now()
		c.Close()
		<-a
		<-b
		require.Zero(t, time.Since(began))
	})
}

// A request after Close gets a page without figures, and starts no reader.
func TestNoReaderAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := fleettest.Example()
		c := newConsole(t, console.Config{Source: source})
		c.Close()
		contains(t, ask(c, local("GET", "/")), "The state of the fleet cannot be read")
		time.Sleep(5 * time.Second)
		require.Zero(t, source.Asked())
	})
}

// Frames contain only changes, and everything when a limit is added, removed or changed.
func TestFramesHaveWhatChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		busy := fleettest.Limit{Name: "/busy", Rate: 5, Granted: 5}
		quiet := fleettest.Limit{Name: "/quiet", Rate: 5}
		source := fleettest.New(1, busy, quiet)
		c := newConsole(t, console.Config{Source: source})
		v := &viewer{}
		leave, _ := look(c, "/stream", v)
		time.Sleep(7 * time.Second)
		require.Equal(t, 1, v.events("all"))
		require.Equal(t, 3, v.events("some"))
		v.mu.Lock()
		frames := strings.Split(v.text.String(), "event: ")
		v.mu.Unlock()
		require.NotContains(t, frames[len(frames)-1], `"1":`, "nothing of the quiet one changes")
		quiet.Rate = 7
		source.Set(busy, quiet)
		time.Sleep(2 * time.Second)
		require.Equal(t, 2, v.events("all"))
		leave()
		c.Close()
	})
}

// Of many that change at once some are sent in each beat, all in the end.
func TestFramesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		many := fleettest.Many(2500)
		for i := range many {
			many[i].Granted = 5
		}
		source := fleettest.New(1, many...)
		c := newConsole(t, console.Config{Source: source})
		v := &viewer{}
		leave, _ := look(c, "/stream", v)
		time.Sleep(11 * time.Second)
		leave()
		c.Close()
		v.mu.Lock()
		defer v.mu.Unlock()
		for _, frame := range strings.Split(v.text.String(), "event: ")[2:] {
			require.Less(t, len(frame), 100_000)
		}
		require.Contains(t, v.text.String(), `"2499":`)
	})
}

// A failing source is reported, and its figures are shown again afterwards.
func TestOutageIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := fleettest.Example()
		c := newConsole(t, console.Config{Source: source})
		v := &viewer{}
		leave, _ := look(c, "/stream", v)
		time.Sleep(3 * time.Second)
		source.Fail(context.DeadlineExceeded)
		time.Sleep(2 * time.Second)
		require.Equal(t, 1, v.events("lost"))
		contains(t, ask(c, local("GET", "/")), "The state of the fleet cannot be read")
		source.Fail(nil)
		time.Sleep(2 * time.Second)
		require.Equal(t, 3, v.events("some")+v.events("all"))
		require.NotContains(t, ask(c, local("GET", "/")).Body.String(), "The state of the fleet cannot be read")
		leave()
		c.Close()
	})
}

// An instance that was killed is named within five seconds, at whatever time between two beats it was killed. One whose beats are as late as
// they may be is not named.
func TestSilenceIsShownInTime(t *testing.T) {
	for after := time.Duration(0); after < 2*time.Second; after += 100 * time.Millisecond {
		synctest.Test(t, func(t *testing.T) {
			source := &beating{began: time.Now(), every: fleet.BeatEvery * 11 / 10, dies: 20*time.Second + after}
			c := newConsole(t, console.Config{Source: source})
			v := &viewer{}
			leave, _ := look(c, "/stream", v)
			said := func() bool {
				v.mu.Lock()
				defer v.mu.Unlock()
				return strings.Contains(v.text.String(), "no report for")
			}
			time.Sleep(source.dies)
			require.False(t, said())
			time.Sleep(5 * time.Second)
			require.True(t, said(), "killed %v after the twentieth second", after)
			leave()
			c.Close()
		})
	}
}

// beating is a fleet of one instance that publishes so often, until it dies.
type beating struct {
	began       time.Time
	every, dies time.Duration
}

func (b *beating) Snapshot(context.Context) (*fleet.Snapshot, error) {
	now := time.Now()
	beats := min(now.Sub(b.began), b.dies) / b.every
	return &fleet.Snapshot{At: now, Instances: []fleet.Instance{{ID: "i", Info: fleet.Info{Started: b.began}, Beats: int64(beats), Beat: b.began.Add(beats * b.every)}}}, nil
}

func (*beating) History(context.Context, string, time.Time) ([]fleet.Point, error) { return nil, nil }
func (*beating) Events(context.Context, time.Time) ([]fleet.Event, error)          { return nil, nil }

// A viewer that comes during an outage gets the full frame afterwards, even if nothing has changed for the others.
func TestViewerOfAnOutageGetsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := fleettest.Example()
		c := newConsole(t, console.Config{Source: source})
		first, second := &viewer{}, &viewer{}
		leave, _ := look(c, "/stream", first)
		time.Sleep(3 * time.Second)
		source.Fail(context.DeadlineExceeded)
		time.Sleep(2 * time.Second)
		leaveToo, _ := look(c, "/stream", second)
		time.Sleep(4 * time.Second)
		require.GreaterOrEqual(t, second.events("lost"), 1)
		source.Fail(nil)
		time.Sleep(4 * time.Second)
		require.Equal(t, 1, second.events("all"))
		require.Equal(t, 1, first.events("all"))
		leave()
		leaveToo()
		c.Close()
	})
}

var _ http.ResponseWriter = (*viewer)(nil)

// bucketCounter counts the buckets that are read, each a command of Redis.
type bucketCounter struct {
	*fleettest.Fleet
	read atomic.Int64
}

func (b *bucketCounter) Bucket(ctx context.Context, name string) (string, [][2]string, error) {
	b.read.Add(1)
	return b.Fleet.Bucket(ctx, name)
}

// Streams of names that no instance has cost Redis nothing, and those of many limits at most a hundred commands per beat.
func TestStreamsOfManyNames(t *testing.T) {
	for name, test := range map[string]struct {
		path string // of a name with a number
		most int64  // commands in ten beats
	}{
		"invented": {"/stream/limit?name=invented-%05d", 0},
		"known":    {"/stream/limit?name=%%2Fservice-%d%%2Fcall-%05d", 11 * 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := &bucketCounter{Fleet: fleettest.New(1, fleettest.Many(300)...)}
				c := newConsole(t, console.Config{Source: source})
				for i := range 300 {
					path := fmt.Sprintf(test.path, i)
					if test.most > 0 {
						path = fmt.Sprintf(test.path, i%17, i)
					}
					leave, _ := look(c, path, &viewer{})
					defer leave()
				}
				time.Sleep(20 * time.Second)
				require.LessOrEqual(t, source.read.Load(), test.most)
				require.Equal(t, test.most > 0, source.read.Load() > 0)
				v := &viewer{}
				leave, _ := look(c, "/stream/limit?name=%2Fservice-1%2Fcall-00001", v)
				defer leave()
				time.Sleep(5 * time.Second)
				require.Positive(t, v.events("limit"))
				if test.most == 0 { // otherwise it may be one of those that are not read
					require.Contains(t, v.text.String(), `"stored"`)
				}
				c.Close()
				synctest.Wait()
			})
		})
	}
}
