package faultlab

import (
	"fmt"
	"testing"
	"time"
)

// figureMark begins a line of a test's output that has a figure. integration/faults/report recognises it too.
const figureMark = "figure: "

// Figure logs a measured value. Of values of one name, in a test and its subtests, docs/faults.md has the least and the most; it is written
// by
//
//	go run ./integration/faults/report
//
// The name describes the value, and its bound if that is a number: "no permit for", "permits in the first 100ms, of 21".
func Figure[V int | int64 | float64 | time.Duration](t testing.TB, name string, value V) {
	t.Helper()
	switch v := any(value).(type) {
	case time.Duration:
		t.Logf("%s%s = %v", figureMark, name, v.Round(10*time.Microsecond))
	case float64:
		t.Logf("%s%s = %s", figureMark, name, fmt.Sprintf("%.4g", v))
	default:
		t.Logf("%s%s = %v", figureMark, name, v)
	}
}
