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

// Source provides what an instance publishes; a Meter is one. If it has a method News() <-chan struct{}, a receive from that
// channel triggers a beat before its time.
type Source interface {
	// Report fills in the present state: all limits, changed or not, in any order. The Report passed in is empty; its slices
	// may have capacity left. ctx has a deadline, and calls do not overlap. Counters of a name must not decrease while the
	// instance lives.
	Report(ctx context.Context, to *Report)
}

// Report is the state of an instance.
type Report struct {
	Info   Info
	Limits []Limit
	// Events since the last report. Their At is by the instance's clock; zero stands for now.
	Events []Event
}

// Publisher publishes the reports of a Source every two seconds, and when there is news, in a goroutine of its own. It
// publishes nothing while Redis is unavailable. Calls counted meanwhile are added to the minute in which Redis returns,
// unless the outage was longer than a minute.
type Publisher struct {
	settings
	client Client
	source Source
	now    func() time.Time
	began  time.Time
	id     string

	report Report
	ledger ledger
	number int64     // of the last beat
	hour   int64     // by Redis' clock
	good   time.Time // when the last successful beat began
	full   time.Time // when everything was last published
	begun  bool      // the event of the start is recorded
	beaten time.Time // when the last beat ended
	warned bool

	mu     sync.Mutex
	missed Missed

	stop context.CancelFunc
	last chan struct{} // receives once when the goroutine has ended; closed after the final beat
}

const (
	// fullEvery is how often everything is published again, changed or not.
	fullEvery = time.Hour
	// leastGap is the least time between the end of a beat and one that news triggers.
	leastGap = 250 * time.Millisecond
	// mostGap is the longest gap that is added to the history afterwards.
	mostGap = time.Minute
)

// NewPublisher starts publishing. Call Close to end it.
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

// newPublisher returns a Publisher that is not started.
func newPublisher(client Client, source Source, now func() time.Time, opts []Option) (*Publisher, error) {
	p := &Publisher{client: client, source: source, settings: newSettings(opts), now: now, ledger: newLedger()}
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

// ID returns the ID of this instance.
func (p *Publisher) ID() string { return p.id }

// Missed returns what could not be published.
func (p *Publisher) Missed() Missed {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.missed
}

// Close publishes that the instance ends, and stops publishing. It waits for Redis until ctx ends. After an error it may be
// called again.
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
			next = leastGap // a change has consequences: a bucket gets its new rate with its next call
			timer.Reset(leastGap - min(leastGap, time.Since(p.beaten)))
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
		}
		_ = p.beat(ctx, false) // the error is recorded in Missed
		p.beaten = time.Now()
		timer.Reset(next)
	}
}

// jittered returns d ± 10 %, so that instances do not publish at the same moment.
func jittered(d time.Duration) time.Duration { return d*9/10 + mathrand.N(d/5) }

// beat reads the source and publishes the differences.
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
		p.ledger.forget()
		p.full = now
	}
	p.ledger.note(&p.report, clock{p.began})
	err := p.publish(ctx, now, ends)
	p.answered(err, now, errors.Is(ctx.Err(), context.Canceled))
	return err
}

// mark adds an event about this instance. It returns true.
func (p *Publisher) mark(kind EventKind) bool {
	p.report.Events = append(p.report.Events, Event{Kind: kind, Instance: p.id, Host: p.report.Info.Host})
	return true
}

// answered records the outcome of a beat. A beat that Close cancelled is not a failure.
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
		p.ledger.skip()
		p.missed.Gap += since
		p.good = now
	}
	if !p.warned && refused(err) {
		p.warned = true
		p.log.Warn("fleet: Redis refuses what this instance publishes for consoles; grant what docs/security.md lists for the user publish, or end it with --publish=false",
			slog.Any("error", err))
	}
}

// publish sends the differences, in as many writes as necessary; usually one.
func (p *Publisher) publish(ctx context.Context, now time.Time, ends bool) error {
	again := false
	for {
		w, more := p.ledger.next()
		status, err := p.write(ctx, w, now, ends && !more)
		switch {
		case err != nil:
			p.ledger.doubt(w)
			return err
		case status == statusUnknown && !again: // Redis has lost it, or dropped it as silent for too long
			again = true
			p.ledger.forget()
			p.ledger.note(&p.report, clock{p.began})
		case status == statusUnknown:
			p.ledger.doubt(w)
			return errors.New("fleet: Redis has lost this instance twice")
		default:
			p.ledger.done(w, p.hour)
			if !more {
				return nil
			}
		}
	}
}

// Statuses that beat.lua returns.
const (
	statusDone    = "done"
	statusOld     = "old"
	statusHour    = "hour"
	statusUnknown = "unknown"
)

// write sends one write. It is repeated if the hour of its keys is over.
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
			return "", errors.New("fleet: malformed reply")
		}
		millis, err := strconv.ParseInt(reply[1], 10, 64)
		if err != nil {
			return "", errors.New("fleet: reply without a time")
		}
		p.hour = hourOf(millis)
		if len(reply) > 2 && reply[2] == "0" && len(p.ledger.rows.all) > 0 {
			p.full = time.Time{} // Redis was out of memory and evicted a key
		}
		if reply[0] != statusHour {
			return reply[0], nil
		}
	}
	return "", errors.New("fleet: the clock of Redis changes its hour with every call")
}

// arguments returns KEYS and ARGV of beat.lua.
func (p *Publisher) arguments(w *write, now time.Time, ends bool) (keys, args []string) {
	keys = append(keys, p.instancesKey(), p.instanceKey(p.id), p.rowsKey(p.id), p.eventsKey(), p.publishedKey(p.hour))
	args = append(args, p.id, whole(p.number), whole(p.hour), whole(now.Sub(p.began).Milliseconds()), flag(w.first), flag(ends),
		whole(int64(len(w.limits))), whole(int64(len(w.fields))), whole(int64(len(w.rows))), whole(int64(len(w.events))))
	for _, l := range w.limits {
		keys = append(keys, p.historyKey(p.hour, l.written.Name))
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
