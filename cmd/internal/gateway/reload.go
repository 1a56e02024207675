package gateway

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// live lists the settings that a running gateway can change. The others apply at the start.
var live = []string{"upstream", "body-timeout", "body-rate", "response-rate", "upgrade", "upgrade-timeout",
	"key", "client-ipv4", "client-ipv6", "client-header", "match", "unknown-status", "trusted-proxy", "drop-header", "priority", "max-age", "drain", "drain-delay", "log-level"}

// reread parses the settings again: the same command line, the environment, and the file as it is now.
func (o *options) reread(given *pflag.FlagSet) (*config, error) {
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

// reload rereads the settings, applies those in the list live, and loads the limits at once. If a setting is invalid, none changes.
func (s *service) reload(ctx context.Context) {
	next, err := s.config.reread(s.config.given)
	if err != nil {
		s.log.Error("the settings could not be reloaded, so the previous ones stay in force", "error", err)
		return
	}
	// The registry is created for keys of one part, or of several. That cannot change later.
	regroup := next.key.joined() != s.config.key.joined()
	if regroup {
		next.options.key = s.proxy.live.Load().options.key
		fields := next.key.fields
		next.key, _ = parseKey(next.options.key, next.clientKey()) // valid before
		next.key.fields.proxies = fields.proxies
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
	if regroup { // the next reload compares with the key in force
		_ = next.given.Lookup("key").Value.Set(next.options.key) // valid before
	}
	if !slices.Equal(next.access.Users, s.config.access.Users) && !slices.Contains(later, "console-users") {
		later = append(later, "console-users") // the file's path is unchanged, but its content differs: removed users can still sign in
	}
	s.proxy.metrics.begin(next.routes)
	s.proxy.live.Store(next)
	s.level.Set(next.level)
	s.log.Info("the settings were reloaded", "changed", strings.Join(changed, ","))
	if len(later) > 0 {
		s.log.Warn("changed settings take effect only after a restart", "settings", strings.Join(later, ","))
	}
	next.logUnknownVariables(s.log)
	_ = s.proxy.metrics.limits.Load().Reload(ctx) // the registry logs its errors
}
