package fleet

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	mathrand "math/rand/v2"
	"strconv"
	"sync"
	"time"
)

// Source tells what one instance has to say. A Meter is one. If it has a method News() <-chan struct{}, it is asked at once when that
// channel has something, rather than at the next beat.
type Source interface {
	// Report fills in what is to be published: all limits, not only those that have changed, in any order. The Report that the
	// Publisher hands over is empty; its slices may have capacity left. ctx has a deadline, and one goroutine at a time calls.
	// Counters of a name must not go down while the instance lives.
	Report(ctx context.Context, to *Report)
}

// Report is what an instance has to say.
type Report struct {
	Info   Info
	Limits []Limit
	// Events since the last report. Their At is by the instance's clock; zero: now.
	Events []Event
}

// Publisher publishes what a Source says, every two seconds and when it has news, by a goroutine of its own. While Redis is away nothing is published;
// what was counted meanwhile is made up for afterwards, and put into the minute of its return, if that is not longer than a minute.
type Publisher struct {
	settings
	client Client
	source Source
	now    func() time.Time
	began  time.Time
	id     string

	report Report
	said   ledger
	number int64     // of the last beat
	hour   int64     // of Redis' clock
	good   time.Time // when the last beat was answered
	full   time.Time // when everything was told last
	begun  bool      // and that was told
	beaten time.Time // when the last beat ended
	warned bool

	mu     sync.Mutex
	missed Missed

	stop context.CancelFunc
	last chan struct{} // has one element when the goroutine has ended: who takes it says that the instance ends. Closed: that was said
}

const (
	// fullEvery is how often everything is told again, changed or not.
	fullEvery = time.Hour
	// leastGap is how much time there is between a beat and one for the sake of news.
	leastGap = 250 * time.Millisecond
	// mostGap is how much time without an answer is made up for in the history.
	mostGap = time.Minute
)

// NewPublisher begins to publish. Close it.
func NewPublisher(client Client, source Source, opts ...Option) (*Publisher, error) {
	p, err := newPublisher(client, source, time.Now, opts)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop, p.last = stop, make(chan struct{}, 1)
	go p.run(ctx)
	return p, nil
}

// newPublisher does not begin.
func newPublisher(client Client, source Source, now func() time.Time, opts []Option) (*Publisher, error) {
	p := &Publisher{client: client, source: source, settings: newSettings(opts), now: now, said: newLedger()}
	if client == nil || source == nil {
		return nil, errors.New("fleet: no client or no source")
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	p.began, p.id = now(), rand.Text()[:12]
	p.good, p.hour = p.began, hourOf(p.began.UnixMilli())
	return p, nil
}

func hourOf(millis int64) int64 { return millis / time.Hour.Milliseconds() }

// ID of this instance.
func (p *Publisher) ID() string { return p.id }

// Missed is what could not be published.
func (p *Publisher) Missed() Missed {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.missed
}

// Close says that the instance ends, and ends publishing. It waits for Redis as long as ctx lets it. One that failed may be tried again.
func (p *Publisher) Close(ctx context.Context) error {
	p.stop()
	select {
	case _, first := <-p.last:
		if !first {
			return nil
		}
		err := p.beat(ctx, true)
		if err != nil {
			p.last <- struct{}{}
			return err
		}
		close(p.last)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *Publisher) run(ctx context.Context) {
	defer func() { p.last <- struct{}{} }()
	var news <-chan struct{}
	if s, ok := p.source.(interface{ News() <-chan struct{} }); ok {
		news = s.News()
	}
	timer := time.NewTimer(jittered(BeatEvery) / 10)
	defer timer.Stop()
	for {
		next := jittered(BeatEvery)
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-news:
			next = leastGap // what follows from it: a bucket has a new rate with its next call
			timer.Reset(leastGap - min(leastGap, time.Since(p.beaten)))
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
		}
		_ = p.beat(ctx, false) // Missed has it
		p.beaten = time.Now()
		timer.Reset(next)
	}
}

// jittered is a time about that long, so that not all instances publish at the same moment.
func jittered(d time.Duration) time.Duration { return d*9/10 + mathrand.N(d/5) }

// beat asks the source, and publishes what is new.
func (p *Publisher) beat(ctx context.Context, ends bool) error {
	p.report = Report{Limits: p.report.Limits[:0], Events: p.report.Events[:0]}
	asking, cancel := context.WithTimeout(ctx, BeatEvery)
	p.source.Report(asking, &p.report)
	cancel()
	p.report.Info.Missed = p.Missed()
	now := p.now()
	if p.begun = p.begun || p.mark(InstanceBegins); ends {
		p.mark(InstanceEnds)
	}
	if now.Sub(p.full) >= fullEvery {
		p.said.forget()
		p.full = now
	}
	p.said.note(&p.report, clock{p.began})
	err := p.tell(ctx, now, ends)
	p.answered(err, now, errors.Is(ctx.Err(), context.Canceled))
	return err
}

// mark adds an event of this instance.
func (p *Publisher) mark(kind EventKind) bool {
	p.report.Events = append(p.report.Events, Event{Kind: kind, Instance: p.id, Host: p.report.Info.Host})
	return true
}

// answered notes how a beat ended; if it was called off, it was nobody's failure.
func (p *Publisher) answered(err error, now time.Time, calledOff bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.good, p.warned = now, false
		return
	}
	if calledOff {
		return
	}
	p.missed.Beats++
	p.missed.Err = shortened(err.Error(), mostText)
	if since := now.Sub(p.good); since > mostGap {
		p.said.skip()
		p.missed.Gap += since
		p.good = now
	}
	if !p.warned && refused(err) {
		p.warned = true
		p.log.Warn("fleet: Redis refuses what this instance publishes for consoles", slog.Any("error", err))
	}
}

// tell sends what is new, in as many writes as it takes: usually one.
func (p *Publisher) tell(ctx context.Context, now time.Time, ends bool) error {
	again := false
	for {
		w, more := p.said.next()
		status, err := p.write(ctx, w, now, ends && !more)
		switch {
		case err != nil:
			p.said.doubt(w)
			return err
		case status == statusUnknown && !again: // Redis has lost it, or has heard nothing for too long
			again = true
			p.said.forget()
			p.said.note(&p.report, clock{p.began})
		case status == statusUnknown:
			p.said.doubt(w)
			return errors.New("fleet: Redis has lost this instance twice")
		default:
			p.said.done(w, p.hour)
			if !more {
				return nil
			}
		}
	}
}

// What the script says.
const (
	statusDone    = "done"
	statusOld     = "old"
	statusHour    = "hour"
	statusUnknown = "unknown"
)

// write sends one write. The hour that it is for may be over.
func (p *Publisher) write(ctx context.Context, w *write, now time.Time, ends bool) (status string, err error) {
	ctx, cancel := context.WithTimeout(ctx, BeatEvery)
	defer cancel()
	p.number++
	for range 3 {
		keys, args := p.arguments(w, now, ends)
		reply, err := beatScript.run(ctx, p.client, len(keys), append(keys, args...)...)
		if err != nil {
			return "", err
		}
		if len(reply) < 2 {
			return "", errors.New("fleet: a reply that is none")
		}
		millis, err := strconv.ParseInt(reply[1], 10, 64)
		if err != nil {
			return "", errors.New("fleet: a reply without a time")
		}
		p.hour = hourOf(millis)
		if len(reply) > 2 && reply[2] == "0" && len(p.said.rows.all) > 0 {
			p.full = time.Time{} // Redis was full, and has dropped a key
		}
		if reply[0] != statusHour {
			return reply[0], nil
		}
	}
	return "", errors.New("fleet: the clock of Redis jumps")
}

// arguments are KEYS and ARGV of beat.lua.
func (p *Publisher) arguments(w *write, now time.Time, ends bool) (keys, args []string) {
	keys = append(keys, p.instancesKey(), p.instanceKey(p.id), p.rowsKey(p.id), p.eventsKey(), p.publishedKey(p.hour))
	args = append(args, p.id, whole(p.number), whole(p.hour), whole(now.Sub(p.began).Milliseconds()), flag(w.first), flag(ends),
		whole(int64(len(w.limits))), whole(int64(len(w.fields))), whole(int64(len(w.rows))), whole(int64(len(w.events))))
	for _, l := range w.limits {
		keys = append(keys, p.historyKey(p.hour, l.said.Name))
		args = append(args, l.record, l.base(), l.rate(p.hour))
	}
	for _, list := range [][]pair{w.fields, w.rows} {
		for _, f := range list {
			args = append(args, f.name, f.text)
		}
	}
	for _, e := range w.events {
		ago := int64(0)
		if !e.at.IsZero() {
			ago = max(0, now.Sub(e.at).Milliseconds())
		}
		args = append(args, whole(ago), e.text)
	}
	return keys, args
}

func flag(b bool) string {
	if b {
		return "1"
	}
	return ""
}

func whole(n int64) string { return strconv.FormatInt(n, 10) }
