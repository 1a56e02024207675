// A chart of calls per second by uPlot: granted, refused and waited, the rate in force as a line, and what happened as marks.
/* global uPlot */
import { number, tick, time } from "./format.js";

const colour = (name) => {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const c = getComputedStyle(probe).color;
  probe.remove();
  return c;
};

const widest = 84; // pixels: of a label of the time axis, as 12:00:00 PM

const faint = (c) => c.replace("rgb(", "rgba(").replace(")", ", 0.12)");

export class Chart {
  // data has columns at (seconds), granted, refused, waited and rate, and marks of {at, kind, text}.
  constructor(box, data) {
    Object.assign(this, { box, data });
    this.make();
    document.addEventListener("theme", () => this.make());
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(box);
  }

  size() {
    return { width: Math.max(200, this.box.clientWidth), height: Math.max(120, this.box.clientHeight - 34) };
  }

  make() {
    this.plot?.destroy();
    const value = (u, v) => (v == null ? "–" : `${number(v)}/s`);
    const series = (label, name, more) => ({ label, value, width: 1.5, stroke: colour(name), points: { show: false }, spanGaps: false, ...more });
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    this.plot = new uPlot({
      ...this.size(),
      series: [
        { label: "Time", value: (u, v) => (v == null ? "–" : time(v * 1000)) },
        series("Granted", "--good", { fill: faint(colour("--good")) }),
        series("Refused", "--bad", { width: 2 }),
        series("Waited", "--wait", { dash: [2, 3] }),
        series("Rate in force", "--muted", { dash: [8, 4], paths: uPlot.paths.stepped({ align: 1 }) }),
      ],
      padding: [null, widest / 2, null, null], // the last label may stand at the right edge
      axes: [{ ...axis, space: widest + 10, values: (u, list, i, space, step) => list.map((v) => tick(v, step)) }, { ...axis, size: 56, values: (u, list) => list.map((v) => number(v)) }],
      scales: { y: { range: (u, low, high) => [0, Math.max(1, (high || 0) * 1.08)] } },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { draw: [(u) => this.marks(u)], setCursor: [(u) => { if (u.cursor.idx == null) this.last(); }] },
    }, this.columns(), this.box);
    this.last();
  }

  // last shows the newest figures in the legend, as long as nobody points at others.
  last() {
    if (this.data.at.length) this.plot.setLegend({ idx: this.data.at.length - 1 });
  }

  columns() {
    const d = this.data;
    return [d.at, d.granted, d.refused, d.waited, d.rate];
  }

  // marks are drawn as lines with a foot.
  marks(u) {
    const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--warm");
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

  // add puts a point at the end, and drops what is older than span seconds.
  add(at, point, span) {
    const d = this.data;
    if (d.at.length && at <= d.at.at(-1)) return;
    d.at.push(at);
    for (const k of ["granted", "refused", "waited", "rate"]) d[k].push(point[k]);
    const old = d.at.findIndex((t) => t >= at - span);
    for (const k of ["at", "granted", "refused", "waited", "rate"]) d[k].splice(0, old);
    this.plot.setData(this.columns());
    if (this.plot.cursor.idx == null) this.last();
  }

  set(data) {
    this.data = data;
    this.plot.setData(this.columns());
    if (this.plot.cursor.idx == null) this.last();
  }
}
