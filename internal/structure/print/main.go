// Command print shows the structure of packages, and what of it exceeds the limits that this project has set itself. Run it
// in the root of the repository; without arguments it shows the packages of the engine:
//
//	go run ./internal/structure/print [-arrows] [package...]
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/internal/structure"
)

const (
	maxFunction = 50  // lines
	maxFile     = 450 // lines
	maxFields   = 18
)

func main() {
	arrows := flag.Bool("arrows", false, "show which file uses which names of which others")
	flag.Parse()
	patterns := flag.Args()
	if len(patterns) == 0 {
		patterns = []string{".", "./semaphore", "./slidingwindow"}
	}
	packages, err := structure.Load(".", patterns...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("| package | files | lines | functions | median | p95 | longest | most fields | exported names | arrows | pairs that use each other |")
	fmt.Println("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
	for _, p := range packages {
		row(p)
	}
	for _, p := range packages {
		excess(p)
		if *arrows {
			showArrows(p)
		}
	}
}

func row(p *structure.Package) {
	functions, structs, arrows := p.Functions(), p.Structs(), p.Arrows()
	mutual := 0
	for a := range arrows {
		if _, ok := arrows[structure.Arrow{From: a.To, To: a.From}]; ok && a.From < a.To {
			mutual++
		}
	}
	fields := "0"
	if len(structs) > 0 {
		fields = fmt.Sprintf("%d (`%s`)", structs[0].Size, structs[0].Name)
	}
	fmt.Printf("| %s | %d | %d | %d | %d | %d | %d | %s | %d | %d | %d |\n", p.Path, len(p.Files), p.Lines(), len(functions),
		quantile(functions, 0.5), quantile(functions, 0.95), quantile(functions, 1), fields, len(p.Exported()), len(arrows), mutual)
}

// quantile of sizes that are sorted, the largest first.
func quantile(sorted []structure.Sized, q float64) int {
	if len(sorted) == 0 {
		return 0
	}
	last := len(sorted) - 1
	return sorted[last-int(q*float64(last)+0.5)].Size
}

func excess(p *structure.Package) {
	fmt.Printf("\n%s\n", p.Path)
	for _, f := range p.Files {
		if f.Lines > maxFile {
			fmt.Printf("  file      %4d lines   %s\n", f.Lines, f.Name)
		}
	}
	for _, f := range p.Functions() {
		if f.Size > maxFunction {
			fmt.Printf("  function  %4d lines   %s %s\n", f.Size, f.File, f.Name)
		}
	}
	for _, s := range p.Structs() {
		if s.Size > maxFields {
			fmt.Printf("  struct    %4d fields  %s %s\n", s.Size, s.File, s.Name)
		}
	}
}

func showArrows(p *structure.Package) {
	arrows := p.Arrows()
	sorted := make([]structure.Arrow, 0, len(arrows))
	for a := range arrows {
		sorted = append(sorted, a)
	}
	slices.SortFunc(sorted, func(a, b structure.Arrow) int { return strings.Compare(a.From+" "+a.To, b.From+" "+b.To) })
	for _, a := range sorted {
		fmt.Printf("  %s → %s: %s\n", a.From, a.To, strings.Join(arrows[a], " "))
	}
}
