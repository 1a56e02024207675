package gateway

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/rawbytes"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

const envPrefix = "TOKENBUCKET_"

func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// load sets the flags that are not on the command line, from the environment or else from the file. The environment takes precedence.
func (o *options) load(flags *pflag.FlagSet, environ []string) error {
	o.given, o.from = flags, map[string]string{}
	known := map[string]string{}
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			known[envName(f.Name)] = f.Name
		}
	})
	o.findUnknownVariables(known, environ)
	environment := koanf.New(".")
	provider := env.Provider(".", env.Opt{
		Prefix:      envPrefix,
		EnvironFunc: func() []string { return environ },
		TransformFunc: func(name, value string) (string, any) {
			if value == "" { // a compose file passes an unset variable as an empty one
				return "", nil
			}
			return known[name], value // unknown names may be Kubernetes variables of a service named tokenbucket
		},
	})
	if err := environment.Load(provider, nil); err != nil {
		return fmt.Errorf("environment: %w", err)
	}
	if err := o.apply(flags, environment, func(flag string) string { return envName(flag) }); err != nil {
		return err
	}
	if o.config == "" {
		return nil
	}
	file, err := readFile(o.config)
	if err != nil {
		return o.bad("config", fmt.Sprintf("%q", o.config), "a YAML file: "+err.Error())
	}
	for _, key := range slices.Sorted(maps.Keys(file.Raw())) {
		if f := flags.Lookup(key); f == nil || key == "help" || key == "config" {
			return fmt.Errorf("%s: unknown key %q: want the name of a flag, see tokenbucket gateway --help%s", o.config, key,
				nearest("; did you mean ", key, flagNames(flags)))
		}
	}
	return o.apply(flags, file, func(flag string) string { return o.config + ": " + flag })
}

func readFile(path string) (*koanf.Koanf, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	k := koanf.New(".")
	if err := k.Load(rawbytes.Provider(text), yaml.Parser()); err != nil {
		message, _, _ := strings.Cut(err.Error(), "'") // the quoted text may be part of a password
		message, _, _ = strings.Cut(message, "`")
		return nil, fmt.Errorf("%s", strings.TrimSpace(message))
	}
	return k, nil
}

// apply sets the flags that are not set yet. source names a setting for messages.
func (o *options) apply(flags *pflag.FlagSet, from *koanf.Koanf, source func(flag string) string) error {
	for flag, value := range from.Raw() {
		f := flags.Lookup(flag)
		if f.Changed {
			continue
		}
		o.from[flag] = source(flag)
		if err := set(f, value); err != nil {
			return o.bad(flag, err.Error(), wanted(f))
		}
		f.Changed = true
	}
	return nil
}

// set sets a flag from a scalar, a list, or a map, which it reads as a list of key=value. The error's text is the rejected value.
func set(f *pflag.Flag, value any) error {
	list, isList := f.Value.(pflag.SliceValue)
	var items []string
	switch v := value.(type) {
	case nil:
		return fmt.Errorf("without a value")
	case []any:
		for _, item := range v {
			items = append(items, fmt.Sprint(item))
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			items = append(items, key+"="+fmt.Sprint(v[key]))
		}
	default:
		text := fmt.Sprint(v)
		if !isList {
			if f.Value.Set(text) != nil {
				return fmt.Errorf("%.80q", text)
			}
			return nil
		}
		items = strings.Split(text, ",")
	}
	if !isList {
		return fmt.Errorf("a list")
	}
	return list.Replace(items)
}
