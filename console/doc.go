// Package console serves web pages for operators of a fleet. They show every limit as it is now, what each instance does, how
// many calls wait, and the history of changes. Authorised users can change limits, with a preview and undo.
//
// New makes an http.Handler. Its pages use relative addresses only, so it can be mounted under any prefix:
//
//	c, err := console.New(console.Config{Source: source})
//	mux.Handle("/console/", http.StripPrefix("/console", c))
//
// By default it is read-only and serves only this machine: see Access. The pages load nothing from other hosts.
//
// The figures come from a Source. One reader asks it once per beat, whatever the number of viewers.
package console
