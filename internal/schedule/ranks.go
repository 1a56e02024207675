package schedule

// sums is a Fenwick tree: prefix sums of numbers that change. Numbers are counted from 1.
type sums []int64

// add adds n to the i-th number.
func (t sums) add(i int, n int64) {
	for ; i < len(t); i += i & -i {
		t[i] += n
	}
}

// until returns the total of the first i numbers.
func (t sums) until(i int) (total int64) {
	for ; i > 0; i &= i - 1 {
		total += t[i]
	}
	return total
}

// ranks numbers the covered waiters in the order of the queue, which is the order in which they were covered. So the number of permits
// ahead of a waiter is found in logarithmic time. The rank of a waiter that has left remains as a gap of 0 permits.
type ranks struct {
	wants sums // permits by rank
	last  int  // the largest rank assigned
}

// leastRanks is the minimum capacity. A larger table is dropped when the last covered waiter leaves.
const leastRanks = 64

// rank assigns the next rank to the first uncovered waiter.
func (q *queue[V]) rank(w *Waiter[V]) {
	r := &q.ranks
	if r.last+1 >= len(r.wants) {
		q.renumber()
	}
	r.last++
	w.rank = r.last
	r.wants.add(w.rank, w.Permits)
}

// unrank removes the rank of a waiter that is no longer covered.
func (q *queue[V]) unrank(w *Waiter[V]) {
	r := &q.ranks
	r.wants.add(w.rank, -w.Permits)
	if w.rank = 0; q.promised == 0 {
		if r.last = 0; len(r.wants) > 2*leastRanks {
			r.wants = nil
		}
	}
}

// renumber closes the gaps of waiters that have left, and doubles the capacity. Its amortised cost is constant.
func (q *queue[V]) renumber() {
	n := 0
	for w := q.head; w != nil && w.rank != 0; w = w.next {
		n++
	}
	q.ranks = ranks{wants: make(sums, max(leastRanks, 2*n)+2)}
	for w := q.head; w != nil && w.rank != 0; w = w.next {
		q.ranks.last++
		w.rank = q.ranks.last
		q.ranks.wants.add(w.rank, w.Permits)
	}
}
