package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/go-tokenbucket/tokenbucket/benchmarks/internal/machine"
)

// results holds the outcomes of all workloads.
type results struct {
	outcomes []outcome
	lines    []line
	machine  machine.Facts
}

// broken returns all violations, wrapped in errBroken.
func (r *results) broken() error {
	var all []error
	for _, o := range r.outcomes {
		for _, err := range o.broken {
			all = append(all, fmt.Errorf("%s: %w", o.row, err))
		}
	}
	if len(all) == 0 {
		return nil
	}
	return fmt.Errorf("%w:\n%w", errBroken, errors.Join(all...))
}

func newTable(header ...any) table.Writer {
	w := table.NewWriter()
	w.SetStyle(table.StyleLight)
	w.Style().Format.Header = text.FormatDefault
	w.AppendHeader(header)
	return w
}

func alignRight(w table.Writer, columns ...int) {
	var configs []table.ColumnConfig
	for _, n := range columns {
		configs = append(configs, table.ColumnConfig{Number: n, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	w.SetColumnConfigs(configs)
}

// targetTable returns a table with a row for each target.
func (r *results) targetTable() table.Writer {
	w := newTable("workload", "what", "measured", "target", "reached")
	alignRight(w, 3, 4)
	for _, o := range r.outcomes {
		for i := range o.targets {
			t := &o.targets[i]
			verdict := t.verdict()
			if len(o.broken) > 0 {
				verdict += ", CHECK VIOLATED"
			}
			w.AppendRow(table.Row{o.row, t.what, t.measured(), t.wanted(), verdict})
		}
	}
	return w
}

// figureTable returns a table with a row for each rival of each workload.
func (r *results) figureTable() table.Writer {
	w := newTable("workload", "rival", "µs/call", "calls/s", "× base", "base", "allocs/call", "remarks")
	alignRight(w, 3, 4, 5, 7)
	for i := range r.outcomes {
		o := &r.outcomes[i]
		base := find(o.figures, o.base)
		for j := range o.figures {
			f := &o.figures[j]
			times := "-"
			if base != nil {
				times = short(f.perSecond() / base.perSecond())
			}
			w.AppendRow(table.Row{o.row, f.rival, short(f.nanos / 1e3), thousands(f.perSecond()), times, o.base, f.allocations(), f.remarks()})
		}
	}
	return w
}

func (f *figure) allocations() string {
	if math.IsNaN(f.allocs) {
		return "-"
	}
	return fmt.Sprintf("%.1f", f.allocs)
}

func (f *figure) remarks() string {
	var all []string
	if f.p99 > 0 {
		all = append(all, fmt.Sprintf("p50 %s, p99 %s", micros(f.p50), micros(f.p99)))
	}
	if f.errors > 0 {
		all = append(all, fmt.Sprintf("%d errors", f.errors))
	}
	if f.wrong != nil {
		all = append(all, "CHECK VIOLATED")
	}
	return strings.Join(all, "; ")
}

// lineTable returns the points of the picture as a table.
func (r *results) lineTable() table.Writer {
	header := []any{"callers"}
	for _, l := range r.lines {
		header = append(header, l.rival)
	}
	w := newTable(header...)
	for i := range r.lines[0].points {
		cells := table.Row{r.lines[0].points[i].callers}
		for _, l := range r.lines {
			cells = append(cells, thousands(l.points[i].perSecond))
		}
		w.AppendRow(cells)
	}
	columns := make([]int, len(header))
	for i := range columns {
		columns[i] = i + 1
	}
	alignRight(w, columns...)
	return w
}

func (r *results) print(out io.Writer) {
	fmt.Fprintln(out, r.figureTable().Render())
	if len(r.lines) > 0 {
		fmt.Fprintf(out, "\nThroughput over callers, calls/s, one bucket\n%s\n", r.lineTable().Render())
	}
	for _, note := range r.notes() {
		fmt.Fprintln(out, note)
	}
	fmt.Fprintf(out, "\n%s\n", r.targetTable().Render())
	if err := r.broken(); err == nil {
		fmt.Fprintln(out, "All checks of what was granted held.")
	}
}

func (r *results) notes() []string {
	var all []string
	for _, o := range r.outcomes {
		for _, n := range o.notes {
			all = append(all, o.row+": "+n)
		}
	}
	return all
}

// Files of the results.
const (
	resultsFile = "RESULTS.md"
	pictureFile = "throughput.svg"
	notesFile   = "notes.md" // read if it exists
)

func (r *results) write(dir string, out io.Writer) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("--out %q: %w", dir, err)
	}
	notes, err := os.ReadFile(filepath.Join(dir, notesFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	files := []struct {
		name string
		text []byte
	}{{resultsFile, r.markdown(notes)}}
	if len(r.lines) > 0 {
		files = append(files, struct {
			name string
			text []byte
		}{pictureFile, throughputPicture(r.lines)})
	}
	for _, f := range files {
		file := filepath.Join(dir, f.name)
		if err := os.WriteFile(file, f.text, 0o644); err != nil {
			return fmt.Errorf("--out %q: %w", dir, err)
		}
		fmt.Fprintln(out, file)
	}
	return nil
}

// redraw draws the picture from the table of results that were written before.
func redraw(dir string, out io.Writer) error {
	text, err := os.ReadFile(filepath.Join(dir, resultsFile))
	if err != nil {
		return err
	}
	lines, err := readLineTable(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(dir, resultsFile), err)
	}
	file := filepath.Join(dir, pictureFile)
	if err := os.WriteFile(file, throughputPicture(lines), 0o644); err != nil {
		return err
	}
	fmt.Fprintln(out, file)
	return nil
}

// readLineTable parses the Markdown of a lineTable.
func readLineTable(text string) ([]line, error) {
	_, text, found := strings.Cut(text, "\n| callers |")
	if !found {
		return nil, errors.New("no table of throughput over callers")
	}
	rows := strings.Split(strings.TrimSpace(text), "\n")
	names := cells(rows[0])
	lines := make([]line, len(names))
	for i := range names {
		lines[i].rival = names[i]
	}
	for _, row := range rows[2:] { // the second has the alignment
		numbers := cells(strings.ReplaceAll(row, ",", ""))
		if len(numbers) != len(lines)+1 {
			return nil, fmt.Errorf("%q: want %d cells", row, len(lines)+1)
		}
		callers, err := strconv.Atoi(numbers[0])
		if err != nil {
			return nil, err
		}
		for i := range lines {
			perSecond, err := strconv.ParseFloat(numbers[i+1], 64)
			if err != nil {
				return nil, err
			}
			lines[i].points = append(lines[i].points, point{callers, perSecond})
		}
	}
	return lines, nil
}

// cells returns the cells of a row of a Markdown table.
func cells(row string) []string {
	all := strings.Split(strings.Trim(strings.TrimSpace(row), "|"), "|")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return all
}

func (r *results) markdown(notes []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Results\n\nWritten by the command below. Medians; rivals took turns within each round. A time a call is wall-clock time over calls: "+
		"of *n* callers at once, each waits *n* times as long.\n\n")
	m := newTable("", "")
	for _, pair := range r.machine {
		m.AppendRow(table.Row{pair[0], pair[1]})
	}
	fmt.Fprintf(&b, "%s\n\n## Targets\n\n%s\n\n", m.RenderMarkdown(), r.targetTable().RenderMarkdown())
	r.missed(&b, notes)
	fmt.Fprintf(&b, "## Measured\n\n%s\n\n", r.figureTable().RenderMarkdown())
	for _, n := range r.notes() {
		fmt.Fprintf(&b, "- %s\n", n)
	}
	if len(r.lines) > 0 {
		fmt.Fprintf(&b, "\n## Throughput over callers\n\nCalls per second, one bucket.\n\n![throughput over callers](%s)\n\n%s\n", pictureFile, r.lineTable().RenderMarkdown())
	}
	return b.Bytes()
}

// missed lists the targets that were not reached, with the notes about them.
func (r *results) missed(b *bytes.Buffer, notes []byte) {
	fmt.Fprintf(b, "## Targets not reached\n\n")
	none := true
	for _, o := range r.outcomes {
		for i := range o.targets {
			if t := &o.targets[i]; !t.reached() {
				none = false
				fmt.Fprintf(b, "- %s, %s: %s, target %s\n", o.row, t.what, t.measured(), t.wanted())
			}
		}
		for _, err := range o.broken {
			none = false
			fmt.Fprintf(b, "- %s: **check violated**: %v\n", o.row, err)
		}
	}
	if none {
		fmt.Fprintf(b, "None.\n")
	}
	b.WriteString("\n")
	if len(notes) > 0 {
		b.Write(bytes.TrimSpace(notes))
		b.WriteString("\n\n")
	}
}
