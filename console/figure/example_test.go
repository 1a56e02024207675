package figure_test

import (
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
)

func Example() {
	fmt.Println(figure.Count(12000), "calls,", figure.Number(4.9), "of", figure.Number(5), "a second,", figure.Share(0.98))
	fmt.Println("waited", figure.Span(497*time.Millisecond)+",", "window of", figure.Exact(90*time.Second))
	fmt.Println(figure.Name("a\nb"))
	// Output:
	// 12,000 calls, 4.9 of 5 a second, 98 %
	// waited 497 ms, window of 90 s
	// a\nb
}
