package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

//go:embed assets templates
var files embed.FS

// firstRows is the number of rows in the page itself, which is shown before any script runs.
const firstRows = 50

// pageTimeout is how long a page waits for the figures. After that it is served without them, and says so.
const pageTimeout = time.Second

func (c *Console) routes() {
	c.mux = http.NewServeMux()
	c.mux.HandleFunc("GET /{$}", c.limitsPage)
	c.mux.HandleFunc("GET /limit", c.limitPage)
	c.mux.HandleFunc("GET /health", c.healthPage)
	c.mux.HandleFunc("GET /holders", c.holdersPage)
	c.mux.HandleFunc("GET /change", c.changePage)
	c.mux.HandleFunc("GET /changes", c.changesPage)
	for what, do := range c.actions() {
		c.mux.HandleFunc("POST /api/"+what, c.act(what, do))
	}
	c.mux.HandleFunc("GET /signin", c.signIn)
	c.mux.HandleFunc("GET /signout", c.signOut)
	c.mux.HandleFunc("GET /assets/", c.asset)
	c.mux.HandleFunc("GET /api/history", c.history)
	c.mux.HandleFunc("GET /api/preview", c.servePreview)
	c.mux.HandleFunc("GET /stream", func(w http.ResponseWriter, r *http.Request) {
		c.stream(w, r, func() *feed { return c.board.feed })
	})
	c.mux.HandleFunc("GET /stream/problems", func(w http.ResponseWriter, r *http.Request) {
		c.stream(w, r, func() *feed { return c.feedOf("problems", c.problemsFrame) })
	})
	c.mux.HandleFunc("GET /stream/limit", c.limitStream)
	c.mux.HandleFunc("GET /stream/health", func(w http.ResponseWriter, r *http.Request) {
		c.stream(w, r, func() *feed { return c.feedOf("health", c.healthFrame) })
	})
	c.mux.HandleFunc("GET /stream/holders", func(w http.ResponseWriter, r *http.Request) {
		c.stream(w, r, func() *feed { return c.feedOf("holders", c.holdersFrame) })
	})
	c.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		c.refuse(w, r, &refusal{status: http.StatusNotFound, text: "There is no such page."})
	})
}

// page is the data of a template.
type page struct {
	Title, Screen string
	User          string
	SignOut       bool // the user can sign out
	Write         bool // this user may change things
	Editable      bool // the console is configured for changes
	Rows          bool // rows can be changed
	Acts          actions
	Token         string // against forged requests; empty for users who may not write
	Problems      []problem
	Totals        *totals
	Strip         []notice
	Name          string // of the page's limit
	Data          any
	V             string // version of the assets
}

// actions are the configured actions, besides changing rows.
type actions struct{ Penalize, Reset, Turn, Confirm bool }

func (c *Console) page(r *http.Request, screen, title string) *page {
	user := principalOf(r)
	p := &page{Title: title, Screen: screen, User: user.name, SignOut: user.token, Write: user.write && c.editable(), Editable: c.editable(), V: assets.version}
	p.Rows, p.Acts = c.config.Editor != nil, actions{c.config.Penalize != nil, c.config.Reset != nil, c.config.Turn != nil, c.config.Confirm != nil}
	if p.Write {
		p.Token = c.auth.forgery(user.name, c.auth.today())
	}
	return p
}

// look adds the state of the fleet to a page. The page is served without it if it cannot be read in time.
func (c *Console) look(r *http.Request, p *page) *view {
	ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
	defer cancel()
	v, err := c.board.now(ctx)
	if err != nil {
		here := c.board.here()
		p.Problems = append(here.problems(), problem{Text: lost(err)})
		return nil
	}
	p.Problems = v.problems()
	t := v.totals()
	p.Totals = &t
	return v
}

// problemsFrame returns the list of problems, for pages that show nothing else of the fleet.
func (c *Console) problemsFrame(ctx context.Context) []byte {
	v, err := c.board.now(ctx)
	if err != nil {
		return c.lost(err)
	}
	return event("problems", must(json.Marshal(v.problems())))
}

// lost returns the event that the state of the fleet cannot be read.
func (c *Console) lost(err error) []byte {
	here := c.board.here()
	return event("lost", must(json.Marshal(here.lost(err))))
}

// lost describes that the state of the fleet cannot be read, and the problems of the process itself.
func (h *Here) lost(err error) string {
	return strings.Join(append([]string{lost(err)}, h.Problems...), " This instance: ")
}

func lost(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "The state of the fleet cannot be read: Redis has not replied in time."
	}
	return "The state of the fleet cannot be read: " + err.Error()
}

var pages = template.Must(template.New("").Funcs(template.FuncMap{
	"number": figure.Number, "span": figure.Span, "exact": figure.Exact, "clock": figure.Clock, "name": figure.Name,
	"count": figure.Count[int], "count64": figure.Count[int64], "full": full[int], "full64": full[int64],
	"ago":   func(t, now time.Time) string { return figure.Span(now.Sub(t).Truncate(time.Second)) },
	"iso":   func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"stamp": func(unix int64) string { return time.Unix(unix, 0).UTC().Format(time.RFC3339) },
	"words": func(s string) []string { return strings.Split(s, ", ") },
}).ParseFS(files, "templates/*.html"))

func (c *Console) render(w http.ResponseWriter, r *http.Request, status int, p *page) {
	var text bytes.Buffer
	if err := pages.ExecuteTemplate(&text, p.Screen+".html", p); err != nil {
		c.config.Log.Error("console: page not rendered", "page", p.Screen, "error", err)
		http.Error(w, "This page cannot be rendered; the console's log has the error.", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(text.Bytes()) // the client may have gone
	}
}

// limitRow is a row of the first page before any script runs.
type limitRow struct {
	Name, Config, State    string
	Rate, Granted, Refused string
	Waiting                int
	Fill, P99, Uses        string
	Refuses, Waits         bool
}

func (c *Console) limitsPage(w http.ResponseWriter, r *http.Request) {
	p := c.page(r, "limits", "Limits")
	var rows []limitRow
	if v := c.look(r, p); v != nil {
		p.Strip = v.strip()
		for _, l := range v.ranked(firstRows) {
			row := limitRow{
				Name: l.name(), Config: describe(l.total.Newest), State: strings.Join(l.states(v), ", "), Rate: figure.Number(l.total.Newest.Bucket.Rate),
				Granted: figure.Number(l.granted()), Refused: figure.Number(l.refused()), Waiting: l.total.Waiting.Count, Fill: "–", P99: "–",
				Refuses: l.refused() > 0 && !l.config().Shadow, Waits: l.total.Waiting.Count > 0,
			}
			if l.config().Shadow && l.refused() > 0 {
				row.Refused = "(" + row.Refused + ")"
			}
			if !v.measured() {
				row.Granted, row.Refused = "–", "–"
			}
			if f := l.fill(); f >= 0 {
				row.Fill = figure.Share(f)
			}
			row.Uses = v.inUseOf(l.name())
			if l.rate.P99 > 0 {
				row.P99 = figure.Span(l.rate.P99)
			}
			rows = append(rows, row)
		}
	}
	p.Data = rows
	c.render(w, r, http.StatusOK, p)
}

func (c *Console) limitPage(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	if name == "" || len(name) > maxName {
		c.refuse(w, r, errName)
		return
	}
	p := c.page(r, "limit", figure.Name(name))
	p.Name = name
	status := http.StatusOK
	if v := c.look(r, p); v != nil {
		d := v.detail(name)
		if !d.Known {
			status = http.StatusNotFound
		}
		d.Marks, d.NoMarks = c.recentMarks(r.Context(), name)
		p.Data = d
	}
	c.render(w, r, status, p)
}

const maxName = 512

var errName = &refusal{status: http.StatusBadRequest, text: "A limit's page wants its name, 1 to 512 bytes."}

// signIn makes the browser ask for a name and a token, which it then sends with every request to the console.
func (c *Console) signIn(w http.ResponseWriter, r *http.Request) {
	if principalOf(r).name == "" {
		if len(c.auth.Users) == 0 {
			c.refuse(w, r, &refusal{status: http.StatusForbidden, text: "Signing in is not possible: this console has no users."})
			return
		}
		c.refuse(w, r, &refusal{status: http.StatusUnauthorized, text: "A name and a token are needed."})
		return
	}
	w.Header().Set("Location", "./")
	w.WriteHeader(http.StatusSeeOther)
}

// signOut makes the browser forget the name and the token of a user: it drops them if they are refused, and asks for others.
// Those of another user are accepted.
func (c *Console) signOut(w http.ResponseWriter, r *http.Request) {
	if user := principalOf(r); user.token && user.name == r.URL.Query().Get("was") {
		c.refuse(w, r, &refusal{status: http.StatusUnauthorized, text: "You are signed out. To sign in again, go back to the limits."})
		return
	}
	w.Header().Set("Location", "./")
	w.WriteHeader(http.StatusSeeOther)
}

// refuse sends an error as JSON or as a page, whichever the request expects.
func (c *Console) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, text := http.StatusInternalServerError, err.Error()
	var why *refusal
	if errors.As(err, &why) {
		status = why.status
	}
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Basic realm="tokenbucket console", charset="UTF-8"`)
	}
	if strings.Contains(r.URL.Path, "/api/") || r.Method != http.MethodGet && r.Method != http.MethodHead {
		answer := map[string]any{"error": text}
		if why != nil && !why.at.IsZero() {
			answer["at"], answer["clock"] = why.at.UTC().Format(time.RFC3339), figure.Clock(why.at)
		}
		if why != nil && why.field != "" {
			answer["field"] = why.field
		}
		if why != nil && len(why.changes) > 0 {
			answer["changes"] = why.changes
		}
		writeJSON(w, status, answer)
		return
	}
	c.render(w, r, status, &page{Title: http.StatusText(status), Screen: "refused", Data: text, V: assets.version})
}

// assets are the files that pages load, by path, and a version that changes with any of them.
var assets = loadAssets()

type assetFiles struct {
	version string
	content map[string][]byte
}

func loadAssets() assetFiles {
	a := assetFiles{content: map[string][]byte{}}
	sum := sha256.New()
	must(0, fs.WalkDir(files, "assets", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := files.ReadFile(name)
		a.content[strings.TrimPrefix(name, "assets/")] = text
		fmt.Fprintf(sum, "%s %d\n", name, len(text))
		sum.Write(text)
		return err
	}))
	a.version = hex.EncodeToString(sum.Sum(nil))[:12]
	return a
}

// asset serves assets/VERSION/PATH. A changed file has another address, so browsers may cache it for ever.
func (c *Console) asset(w http.ResponseWriter, r *http.Request) {
	version, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/assets/"), "/")
	text, ok := assets.content[name]
	if !ok || version != assets.version {
		c.refuse(w, r, &refusal{status: http.StatusNotFound, text: "There is no such file, or not any more: load the page again."})
		return
	}
	kind := mime.TypeByExtension(path.Ext(name))
	if path.Ext(name) == ".js" {
		kind = "text/javascript; charset=utf-8"
	}
	if kind == "" {
		kind = "text/plain; charset=utf-8"
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(text))
}
