package editor

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// An action is read from the audit table as it was written, and is not taken for a row.
func TestActionText(t *testing.T) {
	for _, what := range []string{"reset", `held "back"`, "<&>\u2028", "a\xffb", strings.Repeat("ä", 200)} {
		entry, err := parseEntry([]*string{Text(1), Text(1), Text("ann"), Text("why"), Text("t"), Text("/a"), nil, actionText(what), nil})
		require.NoError(t, err)
		require.Equal(t, strings.ToValidUTF8(what, "?"), entry.Action)
		require.Nil(t, entry.To)
	}
	_, err := parseEntry([]*string{Text(1), Text(1), Text("ann"), Text("why"), Text("t"), Text("/a"), nil, Text(`"x`), nil})
	require.Error(t, err, "it was cut off")
	long := shortenText(strings.Repeat("ä", maxAction), maxAction)
	require.LessOrEqual(t, len(long), maxAction)
	require.True(t, strings.HasSuffix(long, "ä…"), long)
}

// An action without an author, a reason or a text is rejected.
func TestActionIsChecked(t *testing.T) {
	e := newEditor(t, sqlsource.SQLite)
	good := Action{Name: "/a", What: "reset", Who: "ann", Why: "stuck"}
	for field, change := range map[string]func(*Action){
		"who": func(a *Action) { a.Who = "" }, "why": func(a *Action) { a.Why = " " }, "what": func(a *Action) { a.What = strings.Repeat("x", maxAction+1) },
		"name": func(a *Action) { a.Name = strings.Repeat("x", maxName+1) },
	} {
		a := good
		change(&a)
		_, err := e.Act(context.Background(), a, func(context.Context) error { t.Error("it was done"); return nil })
		var bad *registry.RowError
		require.ErrorAs(t, err, &bad)
		require.Equal(t, field, bad.Field)
	}
}
