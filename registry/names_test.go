package registry_test

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// read reads the texts of a row by any of their names.
func read(n registry.Notation, texts map[string]string) (registry.Limit, *registry.Wrong) {
	l := registry.Limit{MaxWait: registry.DefaultMaxWait}
	wrong := l.Read(n, func(f *registry.Field, name int) []byte {
		if text, ok := texts[f.Names()[name]]; ok {
			return []byte(text)
		}
		return nil
	})
	return l, wrong
}

// Each field of a limit is one setting, whose name it has, and no name means two settings.
func TestNamesOfFields(t *testing.T) {
	seen := map[string]bool{}
	var fields []string
	for _, f := range registry.Fields() {
		require.Regexp(t, "^[a-z]+(_[a-z]+)*$", f.Key)
		name := ""
		for _, word := range strings.Split(f.Key, "_") {
			name += strings.ToUpper(word[:1]) + word[1:]
		}
		fields = append(fields, name)
		require.Equal(t, strings.ReplaceAll(f.Key, "_", " "), strings.ToLower(f.Label))
		for _, name := range f.Names() {
			require.False(t, seen[strings.ToLower(name)], name)
			seen[strings.ToLower(name)] = true
		}
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[registry.Limit]()) {
		if f.Name != "Row" && f.Name != "Version" && f.Name != "NoRate" {
			require.Contains(t, fields, f.Name)
		}
	}
}

// A value under an older name is the value under the name of now. Two different values are wrong, and both names are told.
func TestOlderNames(t *testing.T) {
	for older, v := range map[string]struct{ key, old, now, another string }{
		"interfaceUrl":   {"name", "/a", "/a", "/b"},
		"status":         {"disabled", "0", "1", "0"},
		"rateLimit":      {"rate", "5", "5.0", "6"},
		"cache":          {"max_wait", "0.25", "250ms", "0.3"},
		"warmup_ms":      {"warmup", "1500", "1.5", "1500s"},
		"windowLimit":    {"window_limit", "7", "7", "8"},
		"concurrentWait": {"concurrent_wait", "0.5", "500ms", "1s"},
		"perKey":         {"per_key", "1", "true", "0"},
	} {
		row := func(more ...string) map[string]string {
			texts := map[string]string{"name": "/a", "disabled": "0", "rate": "5"}
			switch v.key {
			case "window_limit":
				texts["window"] = "60"
			case "concurrent_wait":
				texts["concurrent"] = "3"
			}
			delete(texts, v.key)
			for i := 0; i < len(more); i += 2 {
				texts[more[i]] = more[i+1]
			}
			return texts
		}
		now, wrong := read(registry.InTable, row(v.key, v.now))
		require.Nil(t, wrong, v.key)
		before, wrong := read(registry.InTable, row(older, v.old))
		require.Nil(t, wrong, older)
		require.Equal(t, now, before, older)
		both, wrong := read(registry.InTable, row(v.key, v.now, older, v.old))
		require.Nil(t, wrong, older)
		require.Equal(t, now, both)
		_, wrong = read(registry.InTable, row(v.key, v.another, older, v.old))
		require.NotNil(t, wrong, older)
		require.Equal(t, [2]string{v.key, older}, [2]string{wrong.Field.Names()[wrong.Name], wrong.Field.Names()[wrong.Other]})
		require.Empty(t, wrong.Want)
	}
	// A row that is off under one name and on under the other is not off.
	_, wrong := read(registry.InTable, map[string]string{"name": "/a", "rate": "5", "disabled": "1", "status": "1"})
	require.NotNil(t, wrong)
	// The name that has the wrong value is told.
	for name, value := range map[string]string{"cache": "-1", "max_wait": "-1ms", "warmup_ms": "x", "status": "2"} {
		texts := map[string]string{"name": "/a", "rate": "5", "disabled": "0", name: value}
		if name == "status" {
			delete(texts, "disabled")
		}
		_, wrong := read(registry.InTable, texts)
		require.NotNil(t, wrong, name)
		require.Equal(t, name, wrong.Field.Names()[wrong.Name])
		require.Equal(t, wrong.Name, wrong.Other)
		require.NotEmpty(t, wrong.Want)
	}
	_, wrong = read(registry.InTable, map[string]string{"name": "/a", "rate": "5", "disabled": "0", "windowLimit": "3"})
	require.Equal(t, "window", wrong.Field.Key)
	_, wrong = read(registry.InTable, map[string]string{"interfaceUrl": "/a*b", "rate": "5", "disabled": "0"})
	require.Equal(t, "interfaceUrl", wrong.Field.Names()[wrong.Name])
}

// Without a rate a row is one of a window or a concurrency alone, in tables and in files.
func TestNoRateInEveryNotation(t *testing.T) {
	for n, no := range map[registry.Notation]string{registry.InTable: "0", registry.InFile: "false"} {
		for _, bound := range []map[string]string{{"concurrent": "3"}, {"window": "60", "window_limit": "7"}, {"window": "1m", "window_limit": "7"}} {
			bound["name"], bound["disabled"] = "/a", no
			l, wrong := read(n, bound)
			require.Nil(t, wrong)
			require.True(t, l.NoRate)
			require.Zero(t, l.MaxWait)
		}
		_, wrong := read(n, map[string]string{"name": "/a", "disabled": no})
		require.Equal(t, "rate", wrong.Field.Key)
	}
}

// A duration is a number of seconds or a text.
func TestParseDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{"0.5": time.Second / 2, "500ms": time.Second / 2, "-1": -time.Second, "1e-6": time.Microsecond, "24h": 24 * time.Hour} {
		d, ok := registry.ParseDuration(text)
		require.True(t, ok, text)
		require.Equal(t, want, d)
	}
	for _, text := range []string{"", "soon", "NaN", "1e300", "5 s"} {
		_, ok := registry.ParseDuration(text)
		require.False(t, ok, text)
	}
}
