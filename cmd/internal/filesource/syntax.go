package filesource

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// decode calls each with the documents of a text, until ctx ends. Its errors name the line that is wrong.
func decode(ctx context.Context, text []byte, each func(*yaml.Node) error) error {
	decoder := yaml.NewDecoder(&heedful{ctx, bytes.NewReader(text)})
	for {
		var n yaml.Node
		switch err := decoder.Decode(&n); {
		case errors.Is(err, io.EOF):
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return syntaxError(ctx, text, err)
		}
		if err := each(&n); err != nil {
			return err
		}
	}
}

// heedful is a reader that fails when its context has ended. A parser asks for a small piece at a time, and so does not outlast the context.
type heedful struct {
	ctx context.Context
	io.Reader
}

func (h *heedful) Read(p []byte) (int, error) {
	if err := h.ctx.Err(); err != nil {
		return 0, err
	}
	return h.Reader.Read(p)
}

var parsersLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// Of the parser's errors, unclosed are about lists and maps in brackets, and endless about a quote.
const (
	unclosed = "did not find expected ',' or"
	endless  = "found unexpected end of stream"
)

// syntaxError is the parser's error with the line that is wrong. The parser itself names that line for some errors only. For others it names
// the line where the list or the map begins, and counts from 0.
//
// The line is found in a few passes, however long the text is: one that shows how far the parser comes, and some that show which of the last
// lines it could have gone on from. To try all lines, or half of the items at a time, takes hours where a comma is missing in a long list.
func syntaxError(ctx context.Context, text []byte, err error) error {
	message := parsersLine.ReplaceAllString(err.Error(), "")
	named, _ := strconv.Atoi(parsersLine.FindStringSubmatch(err.Error())[1])
	line := stumble(ctx, text)
	if strings.Contains(message, endless) { // the parser names the line of the quote
		line = named
	} else {
		line = firstWrong(ctx, text, line)
	}
	if begins := named + 1; strings.Contains(message, unclosed) && begins < line-1 {
		message += fmt.Sprintf(" of what begins on line %d", begins)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("line %d: %s: want YAML", line, message)
}

// stumble returns the line up to which the parser reads before it fails. The parser reads ahead only what it needs, so that is the wrong line
// or, where it has to look whether a text goes on, the next one that is not empty.
func stumble(ctx context.Context, text []byte) int {
	slow := &slowly{text: text}
	decoder := yaml.NewDecoder(&heedful{ctx, slow})
	for {
		var n yaml.Node
		if err := decoder.Decode(&n); err != nil {
			return 1 + bytes.Count(text[:max(0, slow.read-1)], []byte("\n"))
		}
	}
}

// slowly is a reader that hands out byte by byte what its reader might not need any more.
type slowly struct {
	text []byte
	read int
}

func (s *slowly) Read(p []byte) (int, error) {
	if s.read == len(s.text) {
		return 0, io.EOF
	}
	n := copy(p[:1], s.text[s.read:])
	s.read += n
	return n, nil
}

// firstWrong returns the first line that the lines before it do not go on with: this one, or one of the two lines with text before it.
func firstWrong(ctx context.Context, text []byte, line int) int {
	for range 2 {
		before := bytes.TrimRight(text[:start(text, line)], " \r\n")
		if goesOn(ctx, before) {
			break
		}
		line = 1 + bytes.Count(before, []byte("\n"))
	}
	return line
}

// goesOn reports whether a text is the beginning of a document: as it is, or with the brackets closed that a list of limits may have open.
func goesOn(ctx context.Context, text []byte) bool {
	for _, closed := range []string{"", "]", "}", "}]", "]}", "}]}"} {
		if parse(ctx, append(bytes.Clone(text), closed...)) == nil {
			return true
		}
	}
	return false
}

// start returns where a line begins.
func start(text []byte, line int) int {
	at := 0
	for range line - 1 {
		at += bytes.IndexByte(text[at:], '\n') + 1
	}
	return at
}

// parse reads all documents.
func parse(ctx context.Context, text []byte) error {
	decoder := yaml.NewDecoder(&heedful{ctx, bytes.NewReader(text)})
	for {
		var n yaml.Node
		if err := decoder.Decode(&n); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
