package gateway

import (
	"context"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// published reports whether the gateway publishes its state to consoles, through Redis.
func (c *config) published() bool { return c.publish && c.redis != nil }

// meter returns the meter whose counts the gateway publishes, or nil if it does not publish.
func (s *service) meter() *fleet.Meter {
	if !s.config.published() {
		return nil
	}
	return fleet.NewMeter(fleet.WithInfo(func(i *fleet.Info) {
		i.Windows, i.Semaphores = s.inUse()
		policy, _, _ := strings.Cut(s.config.fail, ":")
		i.Version, i.Store.Kind, i.Store.Policy = build(), s.config.store, policy
		if sw := s.admin.sw.Load(); sw != nil {
			i.Switch.Known, i.Switch.Read, i.Switch.Err = true, time.Now().Add(-sw.Age()), message(sw.Err())
		}
	}))
}

// mostInUse bounds the rows whose usage is read for each report.
const mostInUse = 100

// inUse returns the fleet's usage of windows and concurrencies, of at most mostInUse rows.
func (s *service) inUse() (windows []fleet.Window, semaphores []fleet.Semaphore) {
	for name, u := range s.proxy.metrics.usages(context.Background(), mostInUse) {
		if u.Window != 0 {
			windows = append(windows, fleet.Window{Name: name, Limit: int64(u.WindowLimit), Used: int64(u.WindowUsed), Length: u.Window})
		}
		if u.Concurrent != 0 {
			semaphores = append(semaphores, fleet.Semaphore{Name: name, Permits: u.Concurrent, Used: u.Places})
		}
	}
	slices.SortFunc(windows, func(a, b fleet.Window) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(semaphores, func(a, b fleet.Semaphore) int { return strings.Compare(a.Name, b.Name) })
	return windows, semaphores
}

// build returns the version of the program, its commit if it has no version, or "" if neither is known.
func build() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	if info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(len(s.Value), 12)]
		}
	}
	return "unreleased"
}

// counted returns the options with which a registry counts calls, for /metrics and for consoles.
func (s *service) counted() []registry.Option {
	m := s.proxy.metrics
	if c := s.config; s.admin.pulse != nil && c.redis.cluster == nil { // a server of a cluster says nothing about the others
		count := m.observer.Health
		m.observer.Health = func(h tokenbucket.Health) { count(h); s.admin.pulse.noticed(h) }
	}
	if m.meter = s.meter(); m.meter == nil {
		return []registry.Option{registry.WithLimiterOptions(tokenbucket.WithObserver(m.observer)), registry.WithBypassHook(m.bypass)}
	}
	return []registry.Option{
		registry.WithLimiterOptions(tokenbucket.WithObserver(m.meter.Observer(m.observer))),
		registry.WithHook(m.meter.Loaded),
		registry.WithBypassHook(func(name string, by gate.Decider, pass bool) {
			m.bypass(name, by, pass)
			m.meter.Bypassed(name, by, pass)
		}),
	}
}

// startPublisher starts to publish the gateway's state to consoles, if published.
func (s *service) startPublisher(client redis.UniversalClient, limits *registry.Registry) error {
	if s.proxy.metrics.meter == nil {
		return nil
	}
	s.proxy.metrics.meter.Follow(limits)
	p, err := fleet.NewPublisher(client, s.proxy.metrics.meter, fleet.WithKeyPrefix(s.config.keyPrefix), fleet.WithLogger(s.log))
	if err != nil {
		return err
	}
	s.onClose(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = p.Close(ctx) // without the final report, consoles see a silent gateway
	})
	return nil
}
