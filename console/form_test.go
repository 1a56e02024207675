package console_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// byAnn requests a page as a user who may write.
func byAnn(e *editable, path string) *httptest.ResponseRecorder {
	r := local("GET", path)
	r.SetBasicAuth("ann", writerToken)
	return ask(e, r)
}

// TestForm: a flag is a checkbox, a number has its unit and is as a person writes it, and no column's name is a label.
func TestForm(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	e.rows.rows["/ibe/AvailFare"] = editor.Values{"rate": editor.Text("50.000000"), "max_wait": editor.Text("0.250"), "disabled": editor.Text(0), "shadow": nil}
	w := byAnn(e, "/change?name=%2Fibe%2FAvailFare")
	contains(t, w,
		`<input type="checkbox" name="disabled" data-was="0" autocomplete`, `<input type="checkbox" name="shadow" data-was="" data-null="yes" autocomplete`,
		`value="50"`, `data-was="50.000000"`, `<span>/s</span>`, `value="250" data-was="0.250" data-scale="1000" placeholder="500 ms"`, `<span>ms</span>`,
		`<span id="now">50/s, saves up 50, waits up to 250 ms</span>`)
	for _, no := range []string{"stands here as soon as", "for those who ask later", ">rate<", ">max_wait<"} {
		require.NotContains(t, w.Body.String(), no)
	}
	e.rows.rows["/ibe/AvailFare"]["disabled"] = editor.Text("7")
	contains(t, byAnn(e, "/change?name=%2Fibe%2FAvailFare"), `<input name="disabled" value="7"`) // a checkbox would hide the error
}

// TestPenaltyIsChosen: the replies that hold a row back are chosen in words. The default is NULL, and a value that is none of them is shown.
func TestPenaltyIsChosen(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	look := func(penalty *string) *httptest.ResponseRecorder {
		e.rows.rows["/ibe/AvailFare"] = editor.Values{"rate": editor.Text(5), "penalty": penalty}
		return byAnn(e, "/change?name=%2Fibe%2FAvailFare")
	}
	contains(t, look(nil), `Penalty<select name="penalty" data-was="" data-null="yes"`, `<option value="" selected>by default</option>`,
		`<option value="none">no reply</option><option value="503">503 Service Unavailable</option><option value="429">429 Too Many Requests</option><option value="429,503">429 and 503</option></select>`)
	contains(t, look(editor.Text("429,503")), `data-was="429,503"`, `<option value="429,503" selected>429 and 503</option></select>`)
	contains(t, look(editor.Text("503 or so")), `<option value="503 or so" selected>503 or so</option></select>`)
	e.rows.audit = []editor.AuditEntry{{ID: 1, Who: "ann", Why: "new", Name: "/a", From: editor.Values{"rate": editor.Text(5), "penalty": editor.Text("none")},
		To: editor.Values{"rate": editor.Text(5), "penalty": nil}}}
	contains(t, byAnn(e, "/changes"), "Penalty no reply → 503, and 429 if each key has a bucket")
}

// TestConflict: the response names the author of the other change, its time and reason, and the values that differ from the
// page.
func TestConflict(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	token := e.token(t, "ann", writerToken)
	save := func() (said struct {
		Error   string
		Changes []string
	}) {
		body := `{"name":"/ibe/AvailFare","from":"v0","was":{"rate":"5","max_wait":null,"disabled":"0"},"values":{"rate":"7"},"why":"more"}`
		r := post("save", body, "X-Csrf-Token", token)
		r.SetBasicAuth("ann", writerToken)
		w := ask(e, r)
		require.Equal(t, 409, w.Code, w.Body)
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &said))
		return said
	}
	_, err := e.rows.Change(t.Context(), editor.Change{Name: "/ibe/AvailFare", From: "v0", Who: "bob", Why: "it was too low",
		To: editor.Values{"rate": editor.Text("9.0"), "max_wait": editor.Text("0.1"), "disabled": editor.Text(0)}})
	require.NoError(t, err)
	said := save()
	require.Equal(t, []string{"Rate 5/s → 9/s", "Max wait 500 ms → 100 ms"}, said.Changes)
	require.Regexp(t, `^The row was changed meanwhile by bob on .* UTC \(it was too low\)\. Nothing was written\.$`, said.Error)
	e.rows.rows["/ibe/AvailFare"] = editor.Values{"rate": editor.Text(3), "max_wait": editor.Text("0.1"), "disabled": editor.Text(0)} // by hand
	said = save()
	require.Equal(t, "The row was changed meanwhile. The audit table has no entry for that change. Nothing was written.", said.Error)
	require.Contains(t, said.Changes, "Rate 5/s → 3/s")
}

// TestOutcome: the response describes the change in the words of the form.
func TestOutcome(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	e.rows.rows["/ibe/AvailFare"] = editor.Values{"rate": editor.Text(5)}
	r := post("save", orders["save"], "X-Csrf-Token", e.token(t, "ann", writerToken))
	r.SetBasicAuth("ann", writerToken)
	contains(t, ask(e, r), "Saved as change 1: Rate 5/s → 7/s. Each gateway applies it with its next load.")
}

// TestChangesInWords: the history has sentences, without the columns that the database fills in, and a filter in its address.
func TestChangesInWords(t *testing.T) {
	e := newEditable(t, console.Access{Users: users()})
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	e.rows.audit = []editor.AuditEntry{
		{ID: 3, At: at, Who: "bob", Why: "gone", Name: "/old", From: editor.Values{"rate": editor.Text(2)}},
		{ID: 2, At: at, Who: "ann", Why: "slow\u202e", Name: "/a", From: editor.Values{"modified": editor.Text("2026-03-01"), "rate": editor.Text("50.000000"), "note": nil},
			To: editor.Values{"modified": editor.Text("2026-03-04"), "rate": editor.Text("8.5"), "note": editor.Text("x\ny")}},
		{ID: 1, At: at, Who: "ann", Why: "new", Name: "/a", To: editor.Values{"rate": editor.Text(50)}},
	}
	w := byAnn(e, "/changes")
	contains(t, w, "<div>Rate 50/s → 8.5/s</div><div>note not set → x\\ny</div>", "removed; it was 2/s, saves up 2, waits up to 500 ms",
		"added: 50/s, saves up 50, waits up to 500 ms", "4 Mar 05:06:07 UTC", `slow\u202e`)
	require.NotContains(t, w.Body.String(), "modified")
	w = byAnn(e, "/changes?q=ANN+8.5")
	contains(t, w, "8.5/s", `value="ANN 8.5"`)
	require.NotContains(t, w.Body.String(), "removed")
	contains(t, byAnn(e, "/changes?q=nowhere"), "No change matches the filter")
}

// versions is a fleet in which a limit had 50/s until ten minutes ago, and refused nearly all; since then it has 5/s.
type versions struct {
	none
	forgotten bool // the change is not among the events any more
}

var began = time.Now().Truncate(time.Minute).Add(-time.Hour)

func (versions) History(context.Context, string, time.Time) (points []fleet.Point, err error) {
	for i := range 61 {
		p := fleet.Point{Minute: began.Add(time.Duration(i) * time.Minute), Published: true, Granted: 60, Refused: 540, Rate: 50}
		if i >= 50 {
			p.Granted, p.Refused, p.Rate = 540, 60, 5
		}
		points = append(points, p)
	}
	return points, nil
}

func (v versions) Events(context.Context, time.Time) ([]fleet.Event, error) {
	if v.forgotten {
		return nil, nil
	}
	return []fleet.Event{{At: began.Add(49*time.Minute + 30*time.Second), Kind: fleet.LimitChanged, Limit: "/ibe/AvailFare"},
		{At: began.Add(55 * time.Minute), Kind: fleet.LimitChanged, Limit: "/other"}}, nil
}

// TestPreviewBefore: refusals count for the limit under which they were, and a row that is rejected has its error as its preview.
func TestPreviewBefore(t *testing.T) {
	look := func(values string, source console.Source) (said struct{ Now, Text, Error string }) {
		c := newConsole(t, console.Config{Editor: newTable(), Source: source})
		w := ask(c, local("GET", "/api/preview?name=%2Fibe%2FAvailFare&values="+url.QueryEscape(values)))
		require.Equal(t, 200, w.Code, w.Body)
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &said))
		return said
	}
	said := look(`{"rate":"20"}`, versions{})
	require.Equal(t, "5/s, saves up 5, waits up to 500 ms; 10 % of the last 10 minutes' traffic of 10/s was refused.", said.Now)
	require.Equal(t, "20/s, saves up 20, waits up to 500 ms; up to 98 % of the last hour's traffic of 10/s would be refused, perhaps nothing", said.Text)
	require.Equal(t, said, look(`{"rate":"20"}`, versions{forgotten: true}), "the rate in force shows it, too")
	said = look(`{"rate":"-3"}`, versions{})
	require.Equal(t, "Rate -3/s: want a number of permits per second from 0.000000001 to 9 × 10^15, or 0: nothing passes", said.Error)
	require.Empty(t, said.Text, "of a row that is rejected nothing follows")
	require.Contains(t, said.Now, "5/s")
	require.Equal(t, "Max wait many: want 0 to 9,007,199,254,740 ms, or empty", look(`{"max_wait":"many"}`, versions{}).Error)
}
