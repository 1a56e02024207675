package engine

import "github.com/go-tokenbucket/tokenbucket/internal/permit"

// differences are those between configurations of a bucket that replies have shown. Each kind is logged once. The coordinator's mu must be
// held for all methods.
type differences struct {
	conflict  int64 // version whose conflict was logged
	overruled bool  // a difference from a limiter's own configuration was logged, or it comes from this process's SetRate
}

// log logs the differences that a reply shows.
func (d *differences) log(f *flight, out *permit.Outcome) {
	inForce := out.Bucket.Terms
	if out.Conflict && d.conflict != inForce.Version {
		d.conflict = inForce.Version
		logAside(f.limiter, "tokenbucket: two configurations have the same version; the one with the larger hash is in force",
			"bucket", f.batch.Name, "version", inForce.Version, "in force", inForce.Text)
	}
	d.logOverruled(f, inForce)
}

// logOverruled logs that the configuration in force differs from that of a limiter without a version: it was set by SetRate, or by a
// limiter with a version. SetRate in this process is not logged.
func (d *differences) logOverruled(f *flight, inForce *permit.Terms) {
	own := f.limiter.Own
	if d.overruled || own.Version > 0 || inForce.Version == 0 || own.SameContent(inForce) {
		return
	}
	d.overruled = true
	if f.sets() {
		return
	}
	logAside(f.limiter, "tokenbucket: the configuration of this limiter has no version, and another that has one is in force; "+
		"Reset puts the limiter's own in force, WithVersion a newer one", "bucket", f.batch.Name, "own", own.Text, "in force", inForce.Text)
}

// logAside logs a warning in a goroutine of its own, because a log handler may block, call the limiter, or panic.
func logAside(l *Limiter, message string, args ...any) {
	log := &l.Logger
	go func() {
		defer log.Recovered()
		log.Get().Warn(message, args...)
	}()
}
