package script

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// sources are the scripts of this process, by hash.
var sources sync.Map

const refusedCommand = "user executing the script can't"

var (
	// located finds the hash of a script and the line of the refused command, as Redis 7 and Redis 6 name them.
	located = regexp.MustCompile(`([0-9a-f]{40}).*@user_script: ?([0-9]+)`)
	command = regexp.MustCompile(`(?:call|try|send)\('([A-Z]+)'`)
)

// Lacking returns an error with the right that the user of Redis lacks, if a script was refused a command. Redis does not name the command, but
// at best the line of the script. Without it the error has all commands of the script, or of by if the script is not known either. Any other
// error is returned unchanged.
func Lacking(err error, by ...Script) error {
	if err == nil || !strings.Contains(err.Error(), refusedCommand) {
		return err
	}
	source, line := "", ""
	for i := range by {
		source += by[i].Source
	}
	if m := located.FindStringSubmatch(err.Error()); m != nil {
		if known, ok := sources.Load(m[1]); ok {
			source = known.(string)
			if number, lines := atoi(m[2]), strings.Split(source, "\n"); number >= 1 && number <= len(lines) {
				line = lines[number-1]
			}
		}
	}
	if rights := commands(line); rights != nil {
		return fmt.Errorf("%w: the user of Redis needs %s", err, strings.Join(rights, " "))
	}
	if rights := commands(source); rights != nil {
		return fmt.Errorf("%w: the user of Redis needs all of %s", err, strings.Join(rights, " "))
	}
	return err
}

// commands returns the rights to run the commands of a script, sorted.
func commands(source string) (rights []string) {
	for _, called := range command.FindAllStringSubmatch(source, -1) {
		rights = append(rights, "+"+strings.ToLower(called[1]))
	}
	slices.Sort(rights)
	return slices.Compact(rights)
}

func atoi(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}
