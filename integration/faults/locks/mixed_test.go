package locks

import (
	"bufio"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// executed is a command that a server has executed, in the order of execution.
type executed struct {
	at     int64 // microseconds, by the server's clock
	script bool  // it is part of the script before it
	args   []string
}

var monitorLine = regexp.MustCompile(`^\+(\d+)\.(\d{6}) \[\d+ ([^\]]*)\] (.*)$`)

// watch notes what a server executes, until the function that it returns is called.
func watch(t *testing.T, addr string) (end func() []executed) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(t, err)
	lines := bufio.NewReader(conn)
	ok, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "+OK\r\n", ok)
	var all []string
	read := make(chan struct{})
	go func() {
		defer close(read)
		for {
			line, err := lines.ReadString('\n')
			if err != nil || strings.Contains(line, `"the end of the watch"`) {
				return
			}
			all = append(all, line)
		}
	}()
	return func() (done []executed) {
		t.Helper()
		last, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer func() { _ = last.Close() }()
		_, err = last.Write([]byte("ECHO \"the end of the watch\"\r\n"))
		require.NoError(t, err)
		<-read
		for _, line := range all {
			m := monitorLine.FindStringSubmatch(strings.TrimSuffix(line, "\r\n"))
			require.NotNil(t, m, line)
			e := executed{script: m[3] == "lua"}
			e.at, err = strconv.ParseInt(m[1]+m[2], 10, 64)
			require.NoError(t, err)
			for rest := m[4]; rest != ""; rest = strings.TrimPrefix(rest, " ") {
				quoted, err := strconv.QuotedPrefix(rest)
				require.NoError(t, err, line)
				arg, err := strconv.Unquote(quoted)
				require.NoError(t, err, line)
				e.args, rest = append(e.args, arg), rest[len(quoted):]
			}
			done = append(done, e)
		}
		return done
	}
}

// judge reads the commands that were executed on one bucket and its lock. It takes a lock to be live from when it was set, if it was
// certainly free, until it is deleted or shortly before it expires.
type judge struct {
	t            *testing.T
	bucket, lock string
	burst        float64

	holder    string
	until     int64 // when the lock expires
	doubtful  bool  // it may have expired just when another process asked for it
	before    tokenbucket.PermitBucket
	text      string           // of that
	due       []faultlab.Event // by the server's clock
	writes    map[step]int
	contended int // a script came while the lock was live
}

// expiry is the inaccuracy of the expiry of a key as seen from outside, in microseconds: the server may be held up between a lock and the
// line that reports it. A lock that is held for half a second and more belongs to a process that stands still.
const expiry = 250_000

func (j *judge) live(at int64) bool { return j.holder != "" && !j.doubtful && at < j.until-expiry }

// read follows the commands.
func (j *judge) read(all []executed) {
	var outer executed
	var kind step
	for _, e := range all {
		if !e.script {
			outer, kind = e, stepOf(e.args)
			if kind == decide && j.live(e.at) {
				j.contended++
			}
			continue
		}
		switch name := strings.ToLower(e.args[0]); {
		case len(e.args) < 2:
		case name == "set" && e.args[1] == j.lock && !j.live(e.at):
			ttl, err := strconv.ParseInt(e.args[5], 10, 64)
			require.NoError(j.t, err)
			j.doubtful = j.holder != "" && e.at < j.until+expiry
			j.holder, j.until = e.args[2], e.at+ttl*1000
		case name == "del" && e.args[1] == j.lock:
			j.holder, j.doubtful = "", false
		case name == "pexpire" && e.args[1] == j.lock:
			ttl, err := strconv.ParseInt(e.args[2], 10, 64)
			require.NoError(j.t, err)
			j.until = e.at + ttl*1000
		case name == "set" && e.args[1] == j.bucket:
			j.writes[kind]++
			if kind == decide {
				require.False(j.t, j.live(e.at), "a script wrote while %q held the lock", j.holder)
			} else if !j.doubtful {
				require.Equal(j.t, commit, kind)
				require.Equal(j.t, j.holder, outer.args[3+2], "who wrote, and who held the lock")
			}
			j.wrote(e.args[2])
		}
	}
}

// wrote compares a state that was written with what the arithmetic makes of the one before: its number grows, and by every
// permit that was taken, and nothing else has changed.
func (j *judge) wrote(text string) {
	var after tokenbucket.PermitBucket
	require.NoError(j.t, after.UnmarshalText([]byte(text)))
	computed := j.before
	if computed.Epoch == 0 { // a new bucket
		computed = after
		computed.Seq, computed.StoredPermits, computed.NextFreeTicketMicros, computed.CarryMicros = 1, j.burst, after.SeenMicros, 0
	}
	require.Greater(j.t, after.Seq, computed.Seq)
	for range after.Seq - computed.Seq {
		wait, ok := computed.Take(after.SeenMicros, 1, 1000*time.Hour)
		require.True(j.t, ok)
		j.due = append(j.due, faultlab.Event{At: after.SeenMicros + wait.Microseconds(), Permits: 1})
	}
	computed.Tail, computed.Epoch = after.Tail, after.Epoch // they have a random part
	require.Equal(j.t, after, computed)
	j.before, j.text = after, text
}

// Four processes, two with either store, on one bucket at full demand. Every state that is written follows from the one before by the
// arithmetic, and its number only rises. No script writes while the lock is held, and no process writes without it. The due times keep to
// the bound exactly, and every permit that was taken reached its caller.
func TestC6LockAndScriptOnOneKey(t *testing.T) {
	const rate, burst = 2000.0, 200.0
	lasting := faultlab.Lasting(6*time.Second, time.Minute)
	server := redistest.Start(t)
	p := newPlace(t, server)
	end := watch(t, server.Addr)
	var jobs []faultlab.Job
	for _, store := range []string{"lock", "script", "lock", "script"} {
		jobs = append(jobs, faultlab.Job{
			Addrs: []string{server.Addr}, Prefix: p.Prefix, Bucket: p.Name, Store: store, Rate: rate, Burst: burst, Callers: 16,
			Timeout: 500 * time.Millisecond, StoreTimeout: time.Minute,
		})
	}
	fleet := faultlab.StartFleet(t, jobs...)
	time.Sleep(lasting)
	var all []faultlab.Permit
	for i, f := range fleet {
		told := f.End()
		t.Logf("process %d (%s store): %d permits, failures %v", f.Pid, jobs[i].Store, len(faultlab.Used(told)), faultlab.Failures(told))
		all = append(all, told...)
	}
	used := len(faultlab.Used(all))
	j := &judge{t: t, bucket: p.bucket(), lock: p.lock(), burst: burst, writes: map[step]int{}}
	j.read(end())
	t.Logf("written by commits: %d, by scripts: %d; scripts that met a held lock: %d", j.writes[commit], j.writes[decide], j.contended)
	require.Greater(t, j.writes[commit], 100)
	require.Greater(t, j.writes[decide], 100)
	require.Greater(t, j.contended, 20, "a test without contention")
	require.Empty(t, faultlab.Failures(all))
	require.GreaterOrEqual(t, len(j.due), used, "what was granted was taken, once")
	if faultlab.MayLapse(all) {
		t.Logf("answers were late, or callers, by so much that they may have taken others; put off by up to %v", faultlab.MostPutOff(all))
	} else {
		require.Equal(t, len(j.due), used, "what was taken reached its caller")
	}
	span := float64(j.due[len(j.due)-1].At-j.due[0].At) / 1e6
	worst := faultlab.Worst(j.due, rate)
	t.Logf("%d permits fell due in %.2f s", len(j.due), span)
	faultlab.Figure(t, "% of rate × T", 100*float64(len(j.due))/(rate*span))
	faultlab.Figure(t, fmt.Sprintf("fullest window above rate × T, of %v", burst), worst)
	require.LessOrEqual(t, worst, burst+faultlab.Noise(rate))
	faultlab.CleanUp(t, p.Client, p.Prefix)
}
