// A chart of calls per second by uPlot. Stacked areas show calls granted at once, granted after a wait, and refused, so that
// their top is all calls. A line shows the rate in force, and marks show events.
/* global uPlot */
import { number, tick, time } from "./format.js";

const colour = (css) => {
  const probe = document.createElement("span");
  probe.style.color = css;
  document.body.append(probe);
  const c = getComputedStyle(probe).color;
  probe.remove();
  return c;
};

const widest = 84; // pixels of a label of the time axis, such as 12:00:00 PM
const columns = ["granted", "refused", "waited", "rate"];

export class Chart {
  // data has columns at (seconds), granted, refused, waited and rate, and marks of {at, kind, text}.
  constructor(box, data) {
    Object.assign(this, { box, data });
    this.make();
    document.addEventListener("theme", () => this.make());
    new ResizeObserver(() => { if (this.plot.width !== this.size().width) this.plot.setSize(this.size()); }).observe(box);
  }

  size() {
    const width = Math.max(200, this.box.clientWidth);
    return { width, height: width < 500 ? 200 : 260 };
  }

  make() {
    this.plot?.destroy();
    const value = (of) => (u, v, i, at) => { const n = this.data[of][at]; return n == null ? "–" : `${number(n)}/s`; };
    const area = (label, of, name, strength) => ({
      label, value: value(of), width: 1, stroke: colour(`var(${name})`), fill: colour(`color-mix(in srgb, var(${name}) ${strength}%, var(--card))`),
      points: { show: false }, spanGaps: false,
    });
    const axis = { stroke: colour("var(--muted)"), grid: { stroke: colour("var(--line)"), width: 1 }, ticks: { stroke: colour("var(--line)"), width: 1 } };
    this.plot = new uPlot({
      ...this.size(),
      series: [
        { label: "Time", value: (u, v) => (v == null ? "–" : time(v * 1000)) },
        area(this.refused ?? "Refused", "refused", "--bad", 45), area("Granted after a wait", "waited", "--wait", 45), area("Granted at once", "atOnce", "--good", 30),
        { label: "Rate in force", value: value("rate"), width: 1.5, stroke: colour("var(--text)"), dash: [8, 4], points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) },
      ],
      padding: [null, widest / 2, null, null], // the last label may reach the right edge
      axes: [{ ...axis, space: widest + 10, values: (u, list, i, space, step) => list.map((v) => tick(v, step)) }, { ...axis, size: 64, values: (u, list) => list.map((v) => number(v)) }],
      scales: { y: { range: (u, low, high) => [0, (high || 1) * 1.08] } },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { draw: [(u) => this.marks(u)], setCursor: [(u) => { if (u.cursor.idx == null) this.last(); }] },
    }, this.stacked(), this.box);
    this.last();
  }

  // called sets the name of the refused calls: those of a row in shadow would be refused.
  called(refused) {
    if ((this.refused ?? "Refused") === refused) return;
    this.refused = refused;
    this.make();
  }

  // last shows the newest figures in the legend while the cursor is not on the chart.
  last() {
    if (this.data.at.length) this.plot.setLegend({ idx: this.data.at.length - 1 });
  }

  // stacked returns the tops of the areas.
  stacked() {
    const d = this.data, known = (i) => d.granted[i] != null;
    d.atOnce = d.at.map((_, i) => (known(i) ? Math.max(0, d.granted[i] - d.waited[i]) : null));
    return [d.at, d.at.map((_, i) => (known(i) ? d.granted[i] + d.refused[i] : null)), d.granted, d.atOnce, d.rate];
  }

  // marks draws events as lines with a foot.
  marks(u) {
    const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("var(--warm)");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    for (const m of this.data.marks ?? []) {
      const x = Math.round(u.valToPos(m.at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, bbox.top);
      ctx.lineTo(x + 4 * ratio, bbox.top);
      ctx.lineTo(x, bbox.top + 6 * ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  // add appends a point, and drops those older than span seconds.
  add(at, point, span) {
    const d = this.data;
    if (d.at.length && at <= d.at.at(-1)) return;
    d.at.push(at);
    for (const k of columns) d[k].push(point[k]);
    const old = d.at.findIndex((t) => t >= at - span);
    for (const k of ["at", ...columns]) d[k].splice(0, old);
    this.set(d);
  }

  set(data) {
    this.data = data;
    this.plot.setData(this.stacked());
    if (this.plot.cursor.idx == null) this.last();
  }
}
