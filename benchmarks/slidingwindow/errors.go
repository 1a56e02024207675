package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// hand is a clock that the program sets by hand.
type hand struct {
	clockwork.Clock
	micros int64
}

func (h *hand) Now() time.Time { return time.UnixMicro(h.micros) }

func (h *hand) Since(t time.Time) time.Duration { return h.Now().Sub(t) }

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).UnixMicro()

// errorTable compares the limiter's counts with a log of all granted calls.
func errorTable(client *redis.Client, steps int) (string, error) {
	const limit, window, atOnce = 100, time.Minute, 8
	t := table.NewWriter()
	t.AppendHeader(table.Row{"processes", "resolution", "mean error", "worst"})
	for _, processes := range []int{1, 4, 16} {
		for _, parts := range []int{60, 12, 1} {
			s := &simulation{client: client, limit: limit, window: window, atOnce: atOnce, resolution: window / time.Duration(parts)}
			if err := s.run(processes, steps); err != nil {
				return "", err
			}
			if s.worst > 0 {
				return "", fmt.Errorf("%d processes, 1/%d: %d above the limit", processes, parts, s.worst)
			}
			t.AppendRow(table.Row{processes, fmt.Sprintf("window/%d", parts), fmt.Sprintf("%.1f %%", s.mean), fmt.Sprintf("+%d %%", max(0, s.worst))})
		}
	}
	return t.RenderMarkdown(), nil
}

type simulation struct {
	client             *redis.Client
	limit, atOnce      int
	window, resolution time.Duration

	mean  float64
	worst int // most calls above the limit
}

func (s *simulation) run(processes, steps int) error {
	clock := &hand{micros: begin}
	name := fmt.Sprint("errors ", processes, s.resolution, rand.Uint64())
	var all []*slidingwindow.Limiter
	for range processes {
		l, err := slidingwindow.New(name, s.limit, s.window, s.resolution,
			slidingwindow.WithRedis(s.client), slidingwindow.WithClock(clock), slidingwindow.WithLocalTime())
		if err != nil {
			return err
		}
		all = append(all, l)
	}
	random := rand.New(rand.NewPCG(1, 2))
	var log []int64
	measured := 0
	s.worst = math.MinInt
	for range steps {
		clock.micros += int64(random.ExpFloat64() * 0.96e6) // demand of five times the limit
		l := all[random.IntN(processes)]
		var ok atomic.Int64
		var failed atomic.Pointer[error]
		var wg sync.WaitGroup
		for range s.atOnce {
			wg.Go(func() {
				pass, err := l.Allow(ctx)
				if err != nil {
					failed.Store(&err)
				} else if pass {
					ok.Add(1)
				}
			})
		}
		wg.Wait()
		if err := failed.Load(); err != nil {
			return *err
		}
		// A refusal starts a read in the background. Wait for it before the clock advances.
		if _, err := l.Remaining(ctx); err != nil {
			return err
		}
		for range ok.Load() {
			log = append(log, clock.micros)
		}
		for len(log) > 0 && log[0] < clock.micros-s.window.Microseconds() {
			log = log[1:]
		}
		s.worst = max(s.worst, len(log)-s.limit)
		if clock.micros > begin+s.window.Microseconds() {
			measured++
			s.mean += math.Abs(float64(len(log) - s.limit))
		}
	}
	s.mean *= 100 / float64(s.limit) / float64(max(1, measured))
	return nil
}
