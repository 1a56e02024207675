package main

import (
	"slices"
	"time"
)

// row is one workload of the table.
type row struct {
	name string
	run  func(b *bench, o *outcome) error
}

// outcome is the result of a workload.
type outcome struct {
	row     string
	base    string // the rival to which the others are compared
	figures []figure
	targets []target
	notes   []string
	broken  []error // violations of what must hold on any machine; they make the program fail
}

// violate records a violation of what must hold on any machine.
func (o *outcome) violate(err error) {
	if err != nil {
		o.broken = append(o.broken, err)
	}
}

func rows() []row {
	onServer := such(onRedis)
	return []row{
		closed("1 caller, 1 bucket", 1, 1, onServer, redisRate,
			timeAtMost(scriptStore, 1.1, redisRate), timeAtMost(scriptStore, 2.2, ping), timeAtMost(lockStore, 4.5, ping)),
		closed("64 callers, 1 bucket", 64, 1, onServer, redisRate,
			throughputAtLeast(scriptStore, 8, redisRate), throughputAtLeast(lockStore, 5, redisRate)),
		closed("512 callers, 1 bucket", 512, 1, onServer, redisRate,
			throughputAtLeast(scriptStore, 20, redisRate)),
		closed("512 callers, 1000 buckets", 512, 1000, onServer, redisRate,
			throughputAtLeast(scriptStore, 3, redisRate, redisRatePipe, redisRateWait)),
		{"granted from a lease, 64 callers", leased},
		refused("refused under overload, 64 callers", 64),
		closed("in one process, 1 caller", 1, 1, inProcess(), xTimeRate,
			timeAtMost(memoryStore, 0.8, xTimeRate), noAllocations(memoryStore)),
		closed("in one process, 64 callers", 64, 1, inProcess(), xTimeRate,
			timeAtMost(memoryStore, 1.1, xTimeRate), noAllocations(memoryStore)),
		{"bound under overload, 64 callers", overload},
		{"16 processes × 8 callers, 1 bucket", fleet},
		{"1 to 1,000,000 buckets", manyBuckets},
		{"100,000 waiters", manyWaiters},
		{"throughput over callers", curve},
	}
}

func inProcess() []string {
	return such(func(r rival) bool { return !r.redis })
}

// closed returns a workload of closed-loop callers whose calls are all granted.
func closed(name string, callers, keys int, rivals []string, base string, goals ...goal) row {
	return row{name, func(b *bench, o *outcome) error {
		o.base = base
		return b.closedLoop(o, rivals, unlimited, load{Callers: callers, Keys: keys}, allGranted, goals)
	}}
}

func (b *bench) closedLoop(o *outcome, rivals []string, l limit, ld load, want answers, goals []goal) error {
	ld.Duration = b.duration
	cs, err := b.compete(named(rivals...), b.rounds, l, ld, want)
	if err != nil {
		return err
	}
	for _, c := range cs {
		f := c.figure()
		o.figures = append(o.figures, f)
		o.violate(f.wrong)
	}
	for _, g := range goals {
		o.targets = append(o.targets, g(o.figures))
	}
	return nil
}

// leased measures prefetched permits. It needs a rate high enough for prefetching.
func leased(b *bench, o *outcome) error {
	o.base = redisRate
	fast := unlimited
	fast.Rate = 1e9
	return b.closedLoop(o, []string{leaseStore, redisRate, xTimeRate}, fast, load{Callers: 64, Keys: 1}, allGranted, []goal{
		throughputAtLeast(leaseStore, 60, redisRate), timeAtMost(leaseStore, 2, xTimeRate),
	})
}

// refused returns a workload whose calls are all refused. It omits rivals that cannot refuse.
func refused(name string, callers int) row {
	return row{name, func(b *bench, o *outcome) error {
		o.base = redisRate
		o.notes = append(o.notes, uberRatelimit+" cannot refuse, and an empty bucket has nothing to lease: both are left out")
		all := such(func(r rival) bool { return r.refuses && r.name != leaseStore })
		return b.closedLoop(o, all, exhausted, load{Callers: callers, Keys: 1}, allRefused, []goal{
			throughputAtLeast(scriptStore, 100, redisRate), timeAtMost(scriptStore, 0.6, xTimeRate), noAllocations(scriptStore),
		})
	}}
}

// overload offers far more than the rate to each of this library's stores. Its purpose is the bound, which is checked after every round.
func overload(b *bench, o *outcome) error {
	o.base = scriptStore
	ours := such(func(r rival) bool {
		return slices.Contains([]string{memoryStore, lockStore, scriptStore, leaseStore}, r.name)
	})
	l := limit{Rate: 20_000, Burst: 5_000}
	if err := b.closedLoop(o, ours, l, load{Callers: 64, Keys: 1}, either, nil); err != nil {
		return err
	}
	o.notes = append(o.notes, "20,000 permits/s and a burst of 5,000; checked: granted ≤ stored at the start + rate × elapsed + 1 permit")
	return nil
}

// pinged measures a PING by one caller on an otherwise idle machine.
func (b *bench) pinged() (time.Duration, error) {
	l, err := openPing(b.clients, nil, limit{})
	if err != nil {
		return 0, err
	}
	n := drive(l, load{Callers: 1, Keys: 1, Duration: b.duration})
	return n.Elapsed / time.Duration(max(1, n.Granted)), nil
}
