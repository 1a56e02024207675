// A list of any length with only as many elements as are visible. All rows have the same height.
export class VirtualList {
  // make() returns the element of a new row, fill(element, index) shows a row in it.
  constructor(box, { make, fill }) {
    Object.assign(this, { box, make, fill, length: 0, pool: [], from: 0, active: 0 });
    this.spacer = document.createElement("div");
    box.replaceChildren(this.spacer);
    box.classList.add("virtual");
    this.measure();
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => { this.measure(); this.draw(); }).observe(box);
    box.addEventListener("keydown", (e) => this.key(e));
    box.addEventListener("focusin", (e) => {
      const row = e.target.closest(".row");
      if (row) this.active = Number(row.dataset.index);
    });
  }

  measure() {
    const probe = this.pool[0] ?? this.add(), hidden = probe.hidden;
    probe.hidden = false;
    this.height = probe.offsetHeight;
    probe.hidden = hidden;
  }

  add() {
    const row = this.make();
    row.hidden = true;
    row.classList.add("row");
    this.pool.push(row);
    this.spacer.append(row);
    return row;
  }

  setLength(n) {
    this.length = n;
    this.active = Math.min(this.active, Math.max(0, n - 1));
    this.draw();
  }

  // draw shows the visible rows, and some around them.
  draw() {
    this.spacer.style.height = `${this.length * this.height}px`;
    const seen = Math.ceil(this.box.clientHeight / this.height) + 1;
    this.from = Math.max(0, Math.min(Math.floor(this.box.scrollTop / this.height) - 3, this.length - seen - 6));
    const count = Math.min(this.length - this.from, seen + 6);
    while (this.pool.length < count) this.add();
    const focused = document.activeElement?.closest?.(".row");
    for (let n = 0; n < this.pool.length; n++) {
      const index = this.from + n, row = this.pool[index % this.pool.length] ?? this.pool[n];
      row.hidden = n >= count;
      if (n >= count) continue;
      if (row === focused && Number(row.dataset.index) !== index) document.activeElement.blur();
      row.dataset.index = index;
      row.setAttribute("aria-rowindex", index + 2);
      row.style.transform = `translateY(${index * this.height}px)`;
      row.querySelector("a").tabIndex = index === this.active ? 0 : -1;
      this.fill(row, index);
    }
    if (this.length && (this.active < this.from || this.active >= this.from + count)) { // the focus must be on a visible row
      this.active = Math.min(this.length - 1, this.from + (this.from ? 3 : 0));
      this.link(this.active)?.setAttribute("tabindex", "0");
    }
  }

  link(index) {
    return this.pool.find((r) => !r.hidden && Number(r.dataset.index) === index)?.querySelector("a");
  }

  key(e) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.height) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(e.key in steps) || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    this.focus(Math.max(0, Math.min(this.length - 1, this.active + steps[e.key])));
  }

  focus(index) {
    this.active = index;
    const top = index * this.height;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.height > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + this.height - this.box.clientHeight;
    this.draw();
    this.link(index)?.focus({ preventScroll: true });
  }
}
