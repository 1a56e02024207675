//go:build linux

package soak

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// standstill is how far back a server's clock may be set before the bucket follows it: time stands still that long.
const standstill = 2 * time.Second

// fault is one kind of what goes wrong.
type fault struct {
	name string
	// do lets it go wrong, and right again after d at most. It returns how often it bit.
	do func(s *soak, d time.Duration) (int, error)
	// extra permits may be used on top of the bound of windows that it lies in. Above 0, what the bucket has handed out before it
	// is another account than what it hands out afterwards.
	extra float64
	// clock is set: the window's time too stands still or leaps.
	clock bool
}

// A bucket that is lost, or that takes a leap of its clock for time without demand, is full, and forgives its debt: earlier reservations
// are used in addition. The debt is as long as the callers' patience, plus the permits promised to callers whose process was woken late,
// and one for the rounding.
const forgotten = burst + rate*float64(patience)/float64(time.Second) + 3*callers + 1

// kinds of faults. Those without extra lose permits at most.
var kinds = []fault{
	{name: "reply lost", do: requests(faultlab.LoseReply)},
	{name: "connection cut", do: requests(faultlab.CutAfter, faultlab.CutBefore)},
	{name: "delay", do: func(s *soak, d time.Duration) (int, error) {
		return s.seen(func() error {
			s.proxy.Delay(60*time.Millisecond, 50*time.Millisecond, rand.New(rand.NewPCG(s.random.Uint64(), 0)))
			time.Sleep(d)
			s.proxy.Delay(0, 0, nil)
			return nil
		})
	}},
	{name: "network stalled", do: network(faultlab.Stalled)},
	{name: "network cut", do: network(faultlab.Cut)},
	{name: "network down", do: network(faultlab.Down)},
	{name: "server stopped", do: func(s *soak, d time.Duration) (int, error) {
		if err := s.server.Stop(); err != nil {
			return 0, err
		}
		bit := stopped(s.server.Pid)
		time.Sleep(d)
		return bit, s.server.Continue()
	}},
	{name: "server killed", extra: forgotten, do: func(s *soak, d time.Duration) (int, error) {
		was := s.server.Pid
		if err := s.server.Kill(); err != nil {
			return 0, err
		}
		time.Sleep(d / 2)
		err := redistest.Poll(20*time.Second, s.server.Restart)
		if s.server.Pid == was {
			return 0, err
		}
		return 1, err
	}},
	{name: "FLUSHALL", extra: forgotten, do: func(s *soak, _ time.Duration) (int, error) {
		n, err := s.control.DBSize(background).Result()
		if err != nil {
			return 0, err
		}
		return int(n), s.control.FlushAll(background).Err()
	}},
	{name: "bucket deleted", extra: forgotten, do: func(s *soak, _ time.Duration) (int, error) {
		n, err := s.control.Del(background, prefix+"{"+bucket+"}").Result()
		return int(n), err
	}},
	{name: "SCRIPT FLUSH", do: func(s *soak, d time.Duration) (int, error) {
		return s.refused("NOSCRIPT", func() error {
			return again(d, 50*time.Millisecond, func() error { return s.control.ScriptFlush(background).Err() })
		})
	}},
	{name: "clock +1s", do: step(time.Second), extra: forgotten, clock: true},
	{name: "clock -1s", do: step(-time.Second), clock: true},
	{name: "clock +1h", do: step(time.Hour), extra: forgotten, clock: true},
	{name: "clock -1h", do: step(-time.Hour), clock: true},
	// Permits that are granted in a standstill are used later than due by its duration.
	{name: "clock saw-tooth", extra: burst + rate*float64(standstill)/float64(time.Second), clock: true, do: func(s *soak, d time.Duration) (int, error) {
		n := 0
		err := again(d, 100*time.Millisecond, func() error {
			s.clock.Step(-standstill)
			time.Sleep(100 * time.Millisecond)
			s.clock.Step(standstill)
			n++
			return nil
		})
		return n, err
	}},
	{name: "out of memory", do: func(s *soak, d time.Duration) (int, error) {
		return s.refused("OOM", func() error {
			if err := s.control.ConfigSet(background, "maxmemory", "1").Err(); err != nil {
				return err
			}
			time.Sleep(d)
			return s.control.ConfigSet(background, "maxmemory", "0").Err()
		})
	}},
	{name: "process stopped", do: func(s *soak, d time.Duration) (int, error) {
		p := s.fleet[s.random.IntN(len(s.fleet))]
		if err := p.Stop(); err != nil {
			return 0, err
		}
		bit := stopped(p.Pid)
		time.Sleep(d)
		return bit, p.Continue()
	}},
	{name: "process killed", do: func(s *soak, d time.Duration) (int, error) {
		last := len(s.fleet) - 1
		if err := s.fleet[last].Kill(); err != nil {
			return 0, err
		}
		s.fleet[last].End()
		time.Sleep(d / 2)
		s.replace()
		return 1, nil
	}},
	{name: "clients killed", do: func(s *soak, d time.Duration) (n int, err error) {
		err = again(d, 300*time.Millisecond, func() error {
			killed, err := s.control.ClientKillByFilter(background, "TYPE", "normal").Result()
			n += int(killed)
			return err
		})
		return n, err
	}},
	{name: "clients paused", do: func(s *soak, d time.Duration) (int, error) {
		began := time.Now()
		if err := s.control.ClientPause(background, d).Err(); err != nil {
			return 0, err
		}
		err := s.control.Get(background, "soak").Err() // answered when the pause is over
		if err != redis.Nil || time.Since(began) < d/2 {
			return 0, fmt.Errorf("answered after %v: %w", time.Since(began), err)
		}
		return 1, nil
	}},
}

// requests lets one in five requests meet one of the faults.
func requests(those ...faultlab.Fault) func(*soak, time.Duration) (int, error) {
	return func(s *soak, d time.Duration) (int, error) {
		random := rand.New(rand.NewPCG(s.random.Uint64(), 0))
		s.proxy.Match(prefix, func(int64, []string) faultlab.Fault {
			if random.IntN(5) > 0 {
				return faultlab.None
			}
			return those[random.IntN(len(those))]
		})
		time.Sleep(d)
		_ = redistest.Poll(20*time.Second, func() error { // a slow machine asks seldom
			if s.proxy.Bit() == 0 {
				return errors.New("no request was hit")
			}
			return nil
		})
		n := s.proxy.Bit()
		s.proxy.Match("", nil)
		return n, nil
	}
}

// network sets the state of the network. It bites those who ask meanwhile.
func network(to faultlab.Network) func(*soak, time.Duration) (int, error) {
	return func(s *soak, d time.Duration) (int, error) {
		s.proxy.Set(to)
		time.Sleep(d)
		s.proxy.Set(faultlab.Up)
		return 1, nil
	}
}

// step sets the server's clock, for good.
func step(by time.Duration) func(*soak, time.Duration) (int, error) {
	return func(s *soak, _ time.Duration) (int, error) {
		s.clock.Step(by)
		began := time.Now()
		at, err := s.control.Time(background).Result()
		ended := time.Now()
		early, late := began.Add(s.clock.Offset()).Sub(at), at.Sub(ended.Add(s.clock.Offset()))
		if off := max(early, late); err == nil && off > time.Second/2 {
			return 0, fmt.Errorf("the server's clock is off by %v", off)
		}
		return 1, err
	}
}

// seen returns the number of requests while do runs.
func (s *soak) seen(do func() error) (int, error) {
	s.proxy.Match(prefix, nil)
	err := do()
	n := s.proxy.Seen()
	s.proxy.Match("", nil)
	return n, err
}

// refused returns the number of replies of a kind while do runs.
func (s *soak) refused(kind string, do func() error) (int, error) {
	before := s.replies(kind)
	err := do()
	return s.replies(kind) - before, err
}

// replies is how often the server has replied with an error of a kind.
func (s *soak) replies(kind string) int {
	stats, _ := s.control.Info(background, "errorstats").Result()
	_, rest, _ := strings.Cut(stats, "errorstat_"+kind+":count=")
	text, _, _ := strings.Cut(rest, "\r")
	n, _ := strconv.Atoi(text)
	return n
}

// again does something again and again.
func again(d, pause time.Duration, do func() error) error {
	for began := time.Now(); time.Since(began) < d; time.Sleep(pause) {
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

// stopped is 1 when a process hangs.
func stopped(pid int) int {
	if redistest.Poll(5*time.Second, func() error { return faultlab.Stopped(pid) }) != nil {
		return 0
	}
	return 1
}

// deck is kinds in a random order, each once.
func deck(random *rand.Rand) []fault {
	those := slices.Clone(kinds)
	random.Shuffle(len(those), func(i, j int) { those[i], those[j] = those[j], those[i] })
	return those
}
