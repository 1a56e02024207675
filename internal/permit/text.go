package permit

import (
	"math"
	"strconv"
)

// MaxExact is the largest integer up to which every integer is a float64: Lua has no other numbers, so no
// time, version or permit count may exceed it, in either language.
const MaxExact = 1 << 53

// AppendFloat appends a number with 17 digits, which represent every float64 exactly, as lua/bucket.lua does.
func AppendFloat(dst []byte, f float64) []byte {
	if n := int64(f); f == float64(n) && n > -MaxExact && n < MaxExact && (n != 0 || !math.Signbit(f)) {
		return strconv.AppendInt(dst, n, 10) // the same digits, much faster
	}
	return strconv.AppendFloat(dst, f, 'g', 17, 64)
}
