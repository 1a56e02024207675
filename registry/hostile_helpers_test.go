package registry_test

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

func hostileRow(name string, rate float64, change ...func(*registry.Limit)) registry.Limit {
	one := 1.0
	l := registry.Limit{Name: name, Row: name, Rate: rate, Burst: &one, MaxWait: 5 * time.Second}
	for _, f := range change {
		f(&l)
	}
	return l
}
