package filesource

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sort"

	"go.yaml.in/yaml/v3"
)

var parsersLine = regexp.MustCompile(`^yaml: (line \d+: )?`)

// syntaxError is the parser's error with the line that is wrong: the parser itself often names the line where the list begins.
func syntaxError(text []byte, err error) error {
	message := parsersLine.ReplaceAllString(err.Error(), "")
	return fmt.Errorf("line %d: %s: want YAML", firstWrong(bytes.SplitAfter(text, []byte("\n"))), message)
}

// firstWrong is the number of the first line that the lines before it do not go on with. Items are skipped by halves.
func firstWrong(lines [][]byte) int {
	parses := func(n int) bool { return parse(bytes.Join(lines[:n], nil)) == nil }
	items := []int{0}
	for i, line := range lines {
		if bytes.HasPrefix(bytes.TrimLeft(line, " "), []byte("-")) {
			items = append(items, i)
		}
	}
	items = append(items, len(lines))
	bad := sort.Search(len(items)-2, func(i int) bool { return !parses(items[i+1]) }) // the items before are right
	for n := items[bad+1] - 1; n > items[bad]; n-- {
		if parses(n) {
			return n + 1
		}
	}
	return items[bad] + 1
}

// parse reads all documents.
func parse(text []byte) error {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var n yaml.Node
		if err := decoder.Decode(&n); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
