package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The files of deploy are held to what gateways export and understand.

const deploy = "../../deploy/"

// readYAML decodes a file that has no key but those of to.
func readYAML(t *testing.T, path string, to any) {
	t.Helper()
	text, err := os.ReadFile(deploy + path)
	require.NoError(t, err)
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	require.NoError(t, decoder.Decode(to), path)
}

// exported is each metric that gateways export, with the values of its labels.
type exported map[string]map[string]map[string]bool

func (e exported) add(families map[string]*dto.MetricFamily) {
	for family, f := range families {
		names := []string{family}
		if f.GetType() == dto.MetricType_HISTOGRAM {
			names = []string{family + "_bucket", family + "_sum", family + "_count"}
		}
		for _, name := range names {
			if e[name] == nil {
				e[name] = map[string]map[string]bool{"instance": {}, "job": {}}
			}
			if strings.HasSuffix(name, "_bucket") {
				e[name]["le"] = map[string]bool{}
			}
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if e[name][l.GetName()] == nil {
						e[name][l.GetName()] = map[string]bool{}
					}
					e[name][l.GetName()][l.GetValue()] = true
				}
			}
		}
	}
}

// export makes gateways do everything that a metric counts: calls that are granted, refused and held back, and unavailable upstreams and
// Redis.
func export(t *testing.T) exported {
	t.Helper()
	redis := redistest.Start(t)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" || r.URL.Path == "/busy/at/once" {
			w.Header().Set("Retry-After", "30")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(upstream.Close)
	file := newLimitsFile(t, "limits:\n  - {name: /a, rate: 0.001, cache: 0}\n  - {name: /busy, rate: 1000}\n  - {name: /dead, rate: 1000}\n  - {name: /bad}\n"+
		"  - {name: /hourly, rate: none, window: 1h, window_limit: 1}\n  - {name: /busy/at/once, rate: none, concurrent: 1000}\n")
	all := exported{"up": {"instance": {}, "job": {"tokenbucket": true}}}
	var gateways []*process
	for _, fail := range []string{"closed", "open"} {
		p := startGateway(t, "--upstream", upstream.URL, "--upstream", "/dead=http://127.0.0.1:1", "--limits", "file://"+string(file), "--redis", redis.Addr,
			"--switch", "redis:switch", "--fail", fail, "--interval", "50ms", "--store-timeout", "5s")
		for _, path := range []string{"/a", "/busy", "/dead", "/bad", "/no/row", "/hourly", "/busy/at/once"} {
			p.calls(t, path)
		}
		all.add(p.scrape(t))
		gateways = append(gateways, p)
	}
	require.NoError(t, redis.Kill())
	for _, p := range gateways {
		p.calls(t, "/dead") // /busy is held back, and refused without Redis
		all.add(p.scrape(t))
	}
	return all
}

var (
	selector  = regexp.MustCompile(`\b(tokenbucket_\w+|up)\b(?:\{([^}]*)\})?`)
	matcher   = regexp.MustCompile(`^(\w+)(=~|!~|!=|=)"([^"]*)"$`)
	aggregate = regexp.MustCompile(`\b(?:by|on) \(([^)]*)\)`)
	quoted    = regexp.MustCompile(`"[^"]*"`)
	interval  = regexp.MustCompile(`\[(\w+|\$__rate_interval)\]`)
	word      = regexp.MustCompile(`[a-z_]\w+`)
)

// words are all of PromQL that the rules and the board use, besides metrics, labels and durations.
var words = strings.Fields("sum min max count rate increase histogram_quantile clamp_min min_over_time time by on and or unless")

// check returns the fault of an expression: a metric, a label or a label's value that is never exported. It returns the labels that the
// result may have.
func (e exported) check(expression string) (labels map[string]bool, err error) {
	labels = map[string]bool{}
	rest := quoted.ReplaceAllString(expression, "")
	if strings.Count(rest, "(") != strings.Count(rest, ")") || strings.Count(rest, "{") != strings.Count(rest, "}") {
		return nil, fmt.Errorf("%s: brackets do not match", expression)
	}
	for _, m := range selector.FindAllStringSubmatch(expression, -1) {
		has := e[m[1]]
		if has == nil {
			return nil, fmt.Errorf("%s is not exported", m[1])
		}
		for name := range has {
			labels[name] = true
		}
		for _, text := range strings.Split(m[2], ",") {
			if text == "" {
				continue
			}
			part := matcher.FindStringSubmatch(text)
			if part == nil || has[part[1]] == nil {
				return nil, fmt.Errorf("%s has no label %q: it has %v", m[1], text, slices.Sorted(maps.Keys(has)))
			}
			values := []string{part[3]}
			if part[1] == "by" {
				values = strings.Split(part[3], "|")
			}
			for _, value := range values {
				if (part[2] == "=" || part[1] == "by") && value != "$job" && !has[part[1]][value] {
					return nil, fmt.Errorf("%s never has %s: it has %v", m[1], text, has[part[1]])
				}
			}
		}
	}
	if len(labels) == 0 {
		return nil, fmt.Errorf("%s: no metric", expression)
	}
	if groups := aggregate.FindAllStringSubmatch(expression, -1); groups != nil {
		kept := map[string]bool{}
		for _, g := range groups {
			for _, name := range strings.Split(g[1], ", ") {
				if !labels[name] {
					return nil, fmt.Errorf("%s: no metric of it has the label %q", expression, name)
				}
				kept[name] = true
			}
		}
		labels = kept
	}
	for _, pattern := range []*regexp.Regexp{selector, aggregate, interval} {
		expression = pattern.ReplaceAllString(expression, " ")
	}
	for _, w := range word.FindAllString(expression, -1) {
		if !slices.Contains(words, w) {
			return nil, fmt.Errorf("%q is no metric and no function", w)
		}
	}
	return labels, nil
}

type ruleFile struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Alert, Expr, For    string
			Labels, Annotations map[string]string
		}
	}
}

// checkRules checks the alert rules.
func (e exported) checkRules(t *testing.T) {
	var file ruleFile
	readYAML(t, "prometheus/alerts.yaml", &file)
	require.Len(t, file.Groups, 1)
	operations, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, r := range file.Groups[0].Rules {
		require.Regexp(t, `^Tokenbucket[A-Z]\w+$`, r.Alert)
		require.False(t, seen[r.Alert], r.Alert)
		seen[r.Alert] = true
		labels, err := e.check(r.Expr)
		require.NoError(t, err, r.Alert)
		if r.For != "" {
			_, err = model.ParseDuration(r.For)
			require.NoError(t, err, r.Alert)
		}
		require.Contains(t, []string{"page", "ticket", "info"}, r.Labels["severity"], r.Alert)
		require.True(t, strings.Contains(string(operations), "`"+r.Alert+"`"), "docs/operations.md does not say what %s is", r.Alert)
		values := map[string]string{}
		for name := range labels {
			values[name] = "x"
		}
		identity := func(v any) any { return v }
		summary, err := template.New(r.Alert).Option("missingkey=error").Funcs(template.FuncMap{
			"humanize": identity, "humanizeDuration": identity, "humanizePercentage": identity,
		}).Parse("{{$labels := .Labels}}{{$value := .Value}}" + r.Annotations["summary"])
		require.NoError(t, err, r.Alert)
		require.NoError(t, summary.Execute(io.Discard, map[string]any{"Labels": values, "Value": 1.0}), r.Alert)
	}
	require.NotEmpty(t, seen)
}

// checkBoard checks the panels and the variables of the board.
func (e exported) checkBoard(t *testing.T) {
	text, err := os.ReadFile(deploy + "grafana/boards/tokenbucket.json")
	require.NoError(t, err)
	var board struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &board))
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range board.Panels {
		require.False(t, ids[p.ID], p.Title)
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				cell := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				require.Empty(t, cells[cell], "%s is over it", p.Title)
				cells[cell] = p.Title
				require.Less(t, cell[0], 24, p.Title)
			}
		}
		require.Equal(t, p.Type == "row", len(p.Targets) == 0, p.Title)
		for _, target := range p.Targets {
			labels, err := e.check(target.Expr)
			require.NoError(t, err, p.Title)
			for _, name := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(target.LegendFormat, -1) {
				require.True(t, labels[name[1]], "%s: %s", p.Title, target.LegendFormat)
			}
		}
	}
	for _, v := range board.Templating.List {
		if v.Type != "query" {
			continue
		}
		m := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(v.Definition)
		require.NotNil(t, m, v.Name)
		labels, err := e.check(m[1])
		require.NoError(t, err, v.Name)
		require.True(t, labels[m[2]], v.Name)
	}
}

// What alert rules and board name is exported, by these names and with these labels.
func TestBoardAndAlerts(t *testing.T) {
	t.Parallel()
	all := export(t)
	for _, wrong := range []string{
		"tokenbucket_gateway_bad_row > 0", `tokenbucket_gateway_bypassed_total{by=~"window|places"}`, `tokenbucket_decisions_total{outcome="denied"}`, `tokenbucket_store_up{bucket="/a"}`, "rate(tokenbucket_store_up[5m]",
		"sum by (buckets) (tokenbucket_gateway_limit_rate)", "summ(tokenbucket_store_up)", "tokenbucket_wait_duration_seconds > 1", "1 > 0",
	} {
		_, err := all.check(wrong)
		require.Error(t, err, wrong)
	}
	all.checkRules(t)
	all.checkBoard(t)
}

// checked is what tokenbucket check says of settings, with a Redis that is there.
func checked(t *testing.T, args ...string) string {
	t.Helper()
	status, out, errs := execute(context.Background(), append([]string{"check"}, args...)...)
	require.Equal(t, exitOK, status, out+errs)
	return out
}

// The compose file mounts what there is, and its gateways' settings are settings.
func TestComposeFile(t *testing.T) {
	t.Parallel()
	type service struct {
		Image       string
		Build       map[string]string
		Environment map[string]string
		Volumes     []string
		Rest        map[string]any `yaml:",inline"`
	}
	var file struct {
		Gateway  service `yaml:"x-gateway"`
		Services map[string]service
	}
	readYAML(t, "compose.yaml", &file)
	for name, s := range file.Services {
		require.NotEmpty(t, s.Image, name)
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			about, err := os.Stat(deploy + from)
			require.NoError(t, err)
			require.True(t, about.IsDir(), "a file that is mounted does not follow a rename: %s", v)
		}
	}
	for name, port := range map[string]string{"gateway-a": "127.0.0.1:8081:8081", "gateway-b": "127.0.0.1:8091:8081"} {
		s := file.Services[name]
		require.Contains(t, s.Rest["ports"], port, "the console of %s cannot be reached", name)
		require.FileExists(t, filepath.Join(deploy, s.Build["context"], s.Build["dockerfile"]))
		var args []string
		for variable, value := range s.Environment {
			switch variable {
			case "TOKENBUCKET_REDIS":
				require.Equal(t, "redis:6379", value)
				value = redistest.Start(t).Addr
			case "TOKENBUCKET_LIMITS":
				value = strings.Replace(value, "/etc/tokenbucket", deploy+"limits", 1)
			}
			flag := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(variable, "TOKENBUCKET_"), "_", "-"))
			args = append(args, "--"+flag, value)
		}
		out := checked(t, args...)
		require.Contains(t, out, "ok    row limits.yaml: /ibe/AvailFare: 5/s, saves up 5, waits up to 300 ms")
		require.NotContains(t, out, "warn")
	}
	var scraped struct {
		RuleFiles []string `yaml:"rule_files"`
		Scrape    []struct {
			Job     string                       `yaml:"job_name"`
			Targets []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
		Global map[string]string
	}
	readYAML(t, "prometheus/prometheus.yml", &scraped)
	require.FileExists(t, deploy+"prometheus/"+scraped.RuleFiles[0])
	require.Equal(t, "tokenbucket", scraped.Scrape[0].Job)
	require.Equal(t, []string{"gateway-a:8081", "gateway-b:8081"}, scraped.Scrape[0].Targets[0].Targets)
	for _, path := range []string{"datasources/prometheus.yaml", "dashboards/tokenbucket.yaml"} {
		readYAML(t, "grafana/provisioning/"+path, new(map[string]any))
	}
}

// The image is for a user without rights, and builds what there is, with a Go that can.
func TestDockerfile(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(deploy + "Dockerfile")
	require.NoError(t, err)
	stages := regexp.MustCompile(`(?m)^FROM (\S+)`).FindAllStringSubmatch(string(text), -1)
	require.Len(t, stages, 2)
	require.Regexp(t, `distroless/static-debian\d+:nonroot$`, stages[1][1])
	require.Contains(t, string(text), "\nUSER 65532:65532\n")
	module, err := os.ReadFile("../go.mod")
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(module)[1]
	require.Contains(t, stages[0][1], "golang:"+string(version))
	require.Contains(t, string(text), "RUN CGO_ENABLED=0 go build -trimpath -ldflags=\"-s -w\" -o /tokenbucket ./cmd/tokenbucket\n")

	// What the build embeds, or compiles, is sent to it.
	ignored, err := os.ReadFile(deploy + "Dockerfile.dockerignore")
	require.NoError(t, err)
	list := exec.Command("go", "list", "-deps", "-f", `{{if .Module}}{{if .Module.Main}}{{$d := .Dir}}{{range .GoFiles}}{{$d}}/{{.}}
{{end}}{{range .EmbedFiles}}{{$d}}/{{.}}
{{end}}{{end}}{{end}}`, ".")
	files, err := list.Output()
	require.NoError(t, err)
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	needed := strings.Fields(string(files))
	require.Greater(t, len(needed), 200)
	for _, file := range needed {
		path, err := filepath.Rel(root, file)
		require.NoError(t, err)
		for line := range strings.Lines(string(ignored)) {
			pattern := strings.TrimSpace(line)
			if pattern == "" || strings.HasPrefix(pattern, "#") {
				continue
			}
			anywhere, isAnywhere := strings.CutPrefix(pattern, "**/")
			for _, part := range strings.Split(path, "/") {
				matches, err := filepath.Match(anywhere, part)
				require.NoError(t, err)
				require.False(t, isAnywhere && matches, "%s is ignored by %s", path, pattern)
			}
			require.False(t, !isAnywhere && strings.HasPrefix(path, pattern+"/"), "%s is ignored by %s", path, pattern)
		}
	}
}

// The unit is one, and its settings are settings.
func TestSystemdUnit(t *testing.T) {
	t.Parallel()
	settings, err := os.ReadFile(deploy + "systemd/gateway.yaml")
	require.NoError(t, err)
	dir := t.TempDir()
	config := filepath.Join(dir, "gateway.yaml")
	text := strings.NewReplacer("redis: localhost:6379", "redis: "+redistest.Start(t).Addr, "file:///etc/tokenbucket/", "file://"+deploy+"limits/").Replace(string(settings))
	require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
	require.Contains(t, checked(t, "--config", config), "ok    row limits.yaml: /ibe/AvailFare")

	unit, err := os.ReadFile(deploy + "systemd/tokenbucket-gateway.service")
	require.NoError(t, err)
	const command = "/usr/local/bin/tokenbucket gateway --config /etc/tokenbucket/gateway.yaml\n"
	require.Contains(t, string(unit), "ExecStart="+command)
	analyze := redistest.Program(t, "systemd-analyze")
	self, err := os.Executable()
	require.NoError(t, err)
	path := filepath.Join(dir, "tokenbucket-gateway.service")
	require.NoError(t, os.WriteFile(path, bytes.Replace(unit, []byte("/usr/local/bin/tokenbucket"), []byte(self), 1), 0o600))
	out, err := exec.Command(analyze, "verify", "--man=no", path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NotContains(t, string(out), "tokenbucket-gateway.service")
}
