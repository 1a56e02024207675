package gateway

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// live are the settings that a running gateway can change. The others are read when it starts.
var live = []string{"upstream", "body-timeout", "key", "match", "unknown-status", "trusted-proxy", "max-age", "drain", "drain-delay", "log-level"}

// again reads the settings anew: the command line as it was, the environment, and the file as it is now.
func (o *options) again(given *pflag.FlagSet) (*config, error) {
	n := new(options)
	flags := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
	for _, g := range n.flags() {
		flags.AddFlagSet(g.flags)
	}
	var failed error
	given.Visit(func(f *pflag.Flag) {
		own := flags.Lookup(f.Name)
		if own == nil || o.from[f.Name] != "" {
			return
		}
		var err error
		if list, ok := f.Value.(pflag.SliceValue); ok {
			err = own.Value.(pflag.SliceValue).Replace(list.GetSlice())
		} else {
			err = own.Value.Set(f.Value.String())
		}
		if own.Changed = true; err != nil {
			failed = err
		}
	})
	if failed != nil {
		return nil, failed
	}
	if err := n.load(flags, os.Environ()); err != nil {
		return nil, err
	}
	return n.parse()
}

// reload puts in force what can change while the gateway runs, and reads the limits at once. What is wrong changes nothing.
func (s *service) reload(ctx context.Context) {
	next, err := s.config.again(s.config.given)
	if err != nil {
		s.log.Error("the settings were not reloaded; what was before stays in force", "error", err)
		return
	}
	// Whether keys have parts is the registry's to know from the beginning.
	regroup := next.key.joined() != s.config.key.joined()
	if regroup {
		next.options.key = s.proxy.live.Load().options.key
		next.key, _ = parseKey(next.options.key, next.proxies) // it was good before
	}
	var changed, later []string
	inForce := s.proxy.live.Load().given
	next.given.VisitAll(func(f *pflag.Flag) {
		differs := func(from *pflag.FlagSet) bool { return from.Lookup(f.Name).Value.String() != f.Value.String() }
		switch can := slices.Contains(live, f.Name) && (f.Name != "key" || !regroup); {
		case can && differs(inForce):
			changed = append(changed, f.Name)
		case !can && differs(s.config.given):
			later = append(later, f.Name)
		}
	})
	if regroup { // the next reload compares with what is in force
		_ = next.given.Lookup("key").Value.Set(next.options.key) // it was good before
	}
	if !slices.Equal(next.access.Users, s.config.access.Users) && !slices.Contains(later, "console-users") {
		later = append(later, "console-users") // the same file, in which something else stands: who is no longer in it may still come in
	}
	s.proxy.live.Store(next)
	s.level.Set(next.level)
	s.log.Info("the settings were reloaded", "changed", strings.Join(changed, ","))
	if len(later) > 0 {
		s.log.Warn("these settings need a new process", "settings", strings.Join(later, ","))
	}
	next.tellStrangers(s.log)
	_ = s.proxy.metrics.limits.Load().Reload(ctx) // its errors are logged
}
