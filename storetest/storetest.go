// Package storetest holds the conformance suite that every tokenbucket.Store must pass. A store of your own runs it so:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) func() tokenbucket.Store {
//			db := openEmptyDatabase(t)
//			return func() tokenbucket.Store { return mystore.New(db) }
//		})
//	}
package storetest

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// Run checks a store. open is called once a test for an empty place to keep buckets in; what it returns makes stores on
// that place, each as another process would have it. The store's clock must be real.
func Run(t *testing.T, open func(t *testing.T) func() tokenbucket.Store) {
	for name, test := range map[string]func(t *testing.T, store func() tokenbucket.Store){
		"exactly what there is":    exactlyWhatThereIs,
		"keeps every digit":        keepsEveryDigit,
		"reading writes nothing":   readingWritesNothing,
		"a refusal takes nothing":  refusalTakesNothing,
		"buckets are apart":        bucketsAreApart,
		"kinds do not mix":         kindsDoNotMix,
		"the clock moves on":       clockMovesOn,
		"a done context is obeyed": doneContext,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

// config hardly refills: a permit a day.
func config(size float64) tokenbucket.Config {
	return tokenbucket.Config{Rate: 1.0 / 86_400, Size: size, Floor: 1}
}

func batch(name string, c tokenbucket.Config, requests ...tokenbucket.Request) *tokenbucket.Batch {
	return &tokenbucket.Batch{
		Name: name, Config: c, Known: c, Initial: c.Size, Epoch: rand.Int64N(1<<53) + 1, Requests: requests,
		LocalMicros: func() int64 { return time.Now().UnixMicro() },
	}
}

func take(n int64) tokenbucket.Request { return tokenbucket.Request{Permits: n} }

func apply(t *testing.T, s tokenbucket.Store, b *tokenbucket.Batch) tokenbucket.Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := s.Apply(ctx, b)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Eight processes ask for a thousand permits in batches of every size, far more than there are: a thousand are granted.
func exactlyWhatThereIs(t *testing.T, store func() tokenbucket.Store) {
	const permits = 1000
	var mu sync.Mutex
	var processes sync.WaitGroup
	granted := 0
	var seqs []int64
	for p := range 8 {
		s := store()
		processes.Go(func() {
			for i := range 60 {
				b := batch("x", config(permits), slices.Repeat([]tokenbucket.Request{take(1)}, 1+(p+i)%5)...)
				out := apply(t, s, b)
				mu.Lock()
				seqs = append(seqs, out.Bucket.Seq)
				for _, r := range b.Requests {
					if r.Grant.OK {
						granted++
					}
				}
				mu.Unlock()
			}
		})
	}
	processes.Wait()
	if granted != permits {
		t.Errorf("%d permits granted of %d", granted, permits)
	}
	if got := slices.Max(seqs); got != permits+1 {
		t.Errorf("the bucket counts %d changes, want %d", got, permits+1)
	}
}

// What is stored is read back to the last bit, for awkward numbers too.
func keepsEveryDigit(t *testing.T, store func() tokenbucket.Store) {
	for i := range 50 {
		c := tokenbucket.Config{
			Rate: math.Pow(10, rand.Float64()*10-3), Size: rand.Float64() * 1e6, Floor: 1, Version: rand.Int64N(1 << 53),
			Payment: tokenbucket.Payment(i % 2),
		}
		if i%5 == 0 {
			c.Kind, c.Size, c.Floor, c.WarmupMicros, c.ColdFactor = tokenbucket.WarmingUp, 0, 0, 1+rand.Int64N(1e9), 1.1+rand.Float64()
		}
		name := fmt.Sprint("digits", i)
		want := apply(t, store(), batch(name, c, tokenbucket.Request{Permits: 1 + rand.Int64N(1000), MaxWaitMicros: 1 << 53})).Bucket
		got := apply(t, store(), batch(name, c)).Bucket
		want.ReSync(max(want.NextFreeTicketMicros, got.SeenMicros)) // time has passed in between
		got.ReSync(want.NextFreeTicketMicros)
		want.SeenMicros, want.Epoch, want.Tail = got.SeenMicros, got.Epoch, got.Tail // a bucket that overflows forgets its places
		if a, b := text(t, &want), text(t, &got); a != b {
			t.Errorf("wrote %s\n read %s", a, b)
		}
	}
}

func text(t *testing.T, b *tokenbucket.PermitBucket) string {
	t.Helper()
	text, err := b.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func readingWritesNothing(t *testing.T, store func() tokenbucket.Store) {
	first := apply(t, store(), batch("x", config(5))).Bucket
	second := apply(t, store(), batch("x", config(5))).Bucket
	if first.Epoch == second.Epoch {
		t.Error("a bucket was begun by reading it")
	}
	apply(t, store(), batch("x", config(5), take(1)))
	before := apply(t, store(), batch("x", config(5))).Bucket
	after := apply(t, store(), batch("x", config(5))).Bucket
	if before.Seq != after.Seq || before.Epoch != after.Epoch {
		t.Errorf("reading changed %s to %s", text(t, &before), text(t, &after))
	}
}

func refusalTakesNothing(t *testing.T, store func() tokenbucket.Store) {
	b := batch("x", config(5), take(5), take(1), take(1))
	out := apply(t, store(), b)
	if !b.Requests[0].Grant.OK || b.Requests[1].Grant.OK || b.Requests[2].Grant.OK {
		t.Errorf("grants: %+v", b.Requests)
	}
	if b.Requests[1].Grant.WaitMicros <= 0 {
		t.Error("a refusal does not say how long the wait would be")
	}
	again := apply(t, store(), batch("x", config(5), take(1)))
	if again.Bucket.Seq != out.Bucket.Seq {
		t.Errorf("a refusal moved the bucket from %d to %d", out.Bucket.Seq, again.Bucket.Seq)
	}
}

func bucketsAreApart(t *testing.T, store func() tokenbucket.Store) {
	names := []string{"a", "a:lock", "a{b}", "{a}", "%7Ba%7D", "a\x00", "a\r\n", " ", "é"}
	for _, name := range names {
		b := batch(name, config(1), take(1), take(1))
		apply(t, store(), b)
		if !b.Requests[0].Grant.OK || b.Requests[1].Grant.OK {
			t.Errorf("bucket %q: %+v", name, b.Requests)
		}
	}
}

func kindsDoNotMix(t *testing.T, store func() tokenbucket.Store) {
	apply(t, store(), batch("x", config(5), take(1)))
	warm := tokenbucket.Config{Kind: tokenbucket.WarmingUp, Rate: 5, WarmupMicros: 1e6, ColdFactor: 3}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err := store().Apply(ctx, batch("x", warm, take(1))); err == nil {
		t.Error("a warm-up limiter took from a bursty bucket")
	}
	if b := batch("x", config(5), take(4)); !apply(t, store(), b).Changed || !b.Requests[0].Grant.OK {
		t.Error("the bursty bucket was touched")
	}
}

func clockMovesOn(t *testing.T, store func() tokenbucket.Store) {
	first := apply(t, store(), batch("x", config(5), take(1)))
	deadline := time.Now().Add(10 * time.Second)
	for {
		next := apply(t, store(), batch("x", config(5)))
		switch {
		case next.NowMicros < first.NowMicros:
			t.Fatalf("time went from %d to %d", first.NowMicros, next.NowMicros)
		case next.NowMicros > first.NowMicros:
			return
		case time.Now().After(deadline):
			t.Fatal("time stands still")
		}
	}
}

// A context that ended before takes nothing if the store can tell; at the latest the answer is an error.
func doneContext(t *testing.T, store func() tokenbucket.Store) {
	apply(t, store(), batch("x", config(5), take(1)))
	ctx, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	b := batch("x", config(5), take(1))
	if _, err := store().Apply(ctx, b); err != nil {
		if out := apply(t, store(), batch("x", config(5))); out.Bucket.Seq != 2 {
			t.Errorf("an error, but the bucket moved to %d", out.Bucket.Seq)
		}
	}
}
