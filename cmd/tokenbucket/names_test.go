package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	gatewaycmd "github.com/go-tokenbucket/tokenbucket/cmd/internal/gateway"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// camel returns max_wait as MaxWait.
func camel(key string) (name string) {
	for _, word := range strings.Split(key, "_") {
		name += strings.ToUpper(word[:1]) + word[1:]
	}
	return name
}

// setting is a value of a setting in each place. A row has it with companions, as far as it needs them.
type setting struct {
	cell, item string // in the table, and in a file
	stats      any    // in /stats
	companions []string
}

// settings has a value for each setting, which is not the default.
var settings = map[string]setting{
	"name":            {"/name", "/name", "/name", nil},
	"disabled":        {"1", "true", true, nil},
	"shadow":          {"1", "true", true, nil},
	"rate":            {"7", "7", 7.0, nil},
	"max_wait":        {"0.25", "250ms", 0.25, nil},
	"burst":           {"3", "3", 3.0, nil},
	"quota":           {"1", "true", true, nil},
	"jitter":          {"0.05", "50ms", 0.05, []string{"quota"}},
	"warmup":          {"4", "4s", 4.0, nil},
	"cold_factor":     {"2", "2", 2.0, []string{"warmup"}},
	"window_limit":    {"9", "9", 9.0, []string{"window"}},
	"window":          {"60", "1m", 60.0, []string{"window_limit"}},
	"concurrent":      {"3", "3", 3.0, nil},
	"concurrent_wait": {"1.5", "1500ms", 1.5, []string{"concurrent"}},
	"penalty":         {"none", "none", "none", nil},
	"per_key":         {"1", "true", true, nil},
	"priority":        {"low", "low", "low", nil},
}

// nameOf returns the name of the row that shows a setting.
func nameOf(key string) string {
	if key == "per_key" {
		return "/per_key/*"
	}
	return "/" + key
}

// of returns the settings of the row that shows one, without the name.
func (s setting) of(key string) []string {
	all := append([]string{key}, s.companions...)
	if key != "rate" {
		all = append(all, "rate")
	}
	return slices.DeleteFunc(all, func(k string) bool { return k == "name" })
}

// configured returns the limits of a gateway as /stats has them, by name, without what belongs to the process.
func configured(t *testing.T, p *process, rows int) map[string]map[string]any {
	t.Helper()
	all := map[string]map[string]any{}
	eventually(t, func() error {
		_, _, text, err := get(p.admin + "/stats")
		if err != nil {
			return err
		}
		var s struct {
			Limits   []map[string]any `json:"limits"`
			Rejected []any            `json:"rejected"`
		}
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			return err
		}
		if len(s.Limits) != rows || len(s.Rejected) != 0 {
			return fmt.Errorf("%d limits, rejected: %v", len(s.Limits), s.Rejected)
		}
		for _, l := range s.Limits {
			for key := range l {
				if _, ok := settings[key]; !ok {
					delete(l, key)
				}
			}
			all[l["name"].(string)] = l
		}
		return nil
	})
	return all
}

// flagNames returns the flags that the help shows.
func flagNames(f *pflag.FlagSet) (names []string) {
	f.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	return names
}

// A setting has one name: the column of a created table, the key of a file, the field and the label of the console's form, its API, /stats, the
// flag, and the fields in Go. A value that is written in one place is read in all others.
func TestOneName(t *testing.T) {
	t.Parallel()
	var keys, older []string
	for _, f := range registry.Fields() {
		keys, older = append(keys, f.Key), append(older, f.Older...)
		require.Contains(t, settings, f.Key, "the test knows no value of the setting")
	}
	require.Len(t, settings, len(keys))

	// Go: the fields of a limit and of the names of columns.
	var fields []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[registry.Limit]()) {
		fields = append(fields, f.Name)
	}
	other := []string{"Row", "Version", "NoRate"} // no settings: the key and the time of the row, and that it has no rate
	for _, key := range keys {
		other = append(other, camel(key))
	}
	require.ElementsMatch(t, other, fields)
	columns := map[string]string{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[sqlsource.Columns]()) {
		columns[f.Tag.Get("column")] = f.Name
	}
	for _, key := range keys {
		require.Equal(t, camel(key), columns[key])
	}

	// Flags.
	demo := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	new(options).addFlags(demo)
	flags := append(flagNames(demo), flagNames(gatewaycmd.Command().Flags())...)
	for _, key := range []string{"rate", "burst", "max_wait", "warmup", "quota", "jitter", "shadow"} {
		require.Contains(t, flags, strings.ReplaceAll(key, "_", "-"))
	}
	for _, name := range older {
		require.NotContains(t, flags, strings.ReplaceAll(name, "_", "-"))
	}

	// The columns of a created table. Those that are read only if they are named get the name of the setting.
	server := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(upstream.Close)
	db, dsn := newLimits(t)
	shared := []string{"--upstream", upstream.URL, "--redis", server.Addr, "--interval", "200ms"}
	var named []string
	for _, f := range registry.Fields() {
		if f.Column == registry.Named {
			named = append(named, f.Key+"="+f.Key)
		}
	}
	table := startGateway(t, append(shared, "--limits", dsn, "--create-table", "--columns", strings.Join(named, ","), "--console-users", usersFile(t))...)
	rows, err := db.Query("SELECT name FROM pragma_table_info('t_ratelimite_conf')")
	require.NoError(t, err)
	var created []string
	for rows.Next() {
		var name string
		require.NoError(t, rows.Scan(&name))
		created = append(created, name)
	}
	require.NoError(t, rows.Err())
	require.ElementsMatch(t, append([]string{"configId", "channelType", "interfaceNo", "lastModifyTime"}, keys...), created)

	// The form of the console, and its API: each setting in a row of its own.
	console := table.admin + "/console/"
	file := "limits:\n"
	for _, key := range keys {
		status, page, err := ask("GET", console+"change?name="+nameOf(key), "", "")
		require.NoError(t, err)
		require.Equal(t, 200, status, page)
		var shown []string
		for _, m := range regexp.MustCompile(`title="column (\w+)">(?:<input[^>]*><span>)?([^<]+)<`).FindAllStringSubmatch(page, -1) {
			shown = append(shown, m[1])
			require.Equal(t, m[1], strings.ToLower(strings.ReplaceAll(m[2], " ", "_")), "the label")
			require.Contains(t, page, `name="`+m[1]+`"`, "the field of the form")
		}
		require.ElementsMatch(t, slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return k == "name" }), shown)

		values := map[string]string{}
		file += "  - {name: " + nameOf(key)
		for _, k := range settings[key].of(key) {
			values[k] = settings[k].cell
			file += ", " + k + ": " + settings[k].item
		}
		file += "}\n"
		order, err := json.Marshal(map[string]any{"name": nameOf(key), "values": values, "why": "a test"})
		require.NoError(t, err)
		status, said, err := ask("POST", console+"api/save", pageToken.FindStringSubmatch(page)[1], string(order))
		require.NoError(t, err)
		require.Equal(t, 200, status, said)
		var cell string
		require.NoError(t, db.QueryRow("SELECT CAST("+"`"+key+"`"+" AS TEXT) FROM t_ratelimite_conf WHERE name = ?", nameOf(key)).Scan(&cell))
		require.Equal(t, settings[key].cell, strings.TrimSuffix(cell, ".0"), key)
	}

	// What the gateways of the table and of the file have in force is the same, under the same names.
	ofTable := configured(t, table, len(keys))
	for _, key := range keys {
		require.Equal(t, settings[key].stats, ofTable[nameOf(key)][key], key)
	}
	ofFile := configured(t, newLimitsFile(t, file).start(t), len(keys))
	require.Equal(t, ofTable, ofFile)

	// A bad value is reported under the name.
	for _, key := range keys {
		item := "  - {name: /bad"
		for _, k := range settings[key].of(key) {
			if k != key {
				item += ", " + k + ": " + settings[k].item
			}
		}
		if key == "name" {
			item = "  - {rate: 5"
		}
		status, out, errs := execute(t.Context(), "check", "--upstream", "http://u:1", "--store", "memory", "--wait", "1s", "--limits",
			"file://"+string(newLimitsFile(t, "limits:\n"+item+", "+key+": [x]}\n")))
		require.Equal(t, 1, status, out+errs)
		require.Contains(t, out, ": "+key+" a list: want ")
	}
}
