package registry

import (
	"strconv"
	"strings"
)

// number formats f for a person: up to 15 significant digits, which distinguish any two settings in practice, thousands
// separated, no exponent. 0.1234, 1,000,000.
func number(f float64) string {
	f, _ = strconv.ParseFloat(strconv.FormatFloat(f, 'e', 14, 64), 64)
	text := strconv.FormatFloat(f, 'f', -1, 64)
	sign := ""
	if strings.HasPrefix(text, "-") {
		sign, text = "-", text[1:]
	}
	whole, fraction, broken := strings.Cut(text, ".")
	if strings.Trim(whole, "0123456789") != "" {
		return sign + whole // an infinity, or not a number
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if broken {
		whole += "." + fraction
	}
	return sign + whole
}
