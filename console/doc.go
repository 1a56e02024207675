// Package console is a web page for those who run a fleet: every limit as it is now, what each instance does, who waits, and
// what has changed; and, for those who may, a way to change a limit, with a preview and undo.
//
// New makes an http.Handler. It serves pages with relative addresses only, so it may stand under any prefix:
//
//	c, err := console.New(console.Config{Source: source})
//	mux.Handle("/console/", http.StripPrefix("/console", c))
//
// By default it is read-only, and answers only this machine: see Access. The pages ask no other host for anything.
//
// What the pages show comes from a Source. One reader asks it, once in a beat, however many look.
package console
