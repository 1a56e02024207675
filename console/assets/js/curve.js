// The curve of a warm-up: the interval between permits by the number stored, and the bucket's present position.
import { svg } from "./dom.js";
import { span } from "./format.js";

const w = 320, h = 130, left = 60, bottom = 22, top = 10, right = 12;

export function drawCurve(box, c) {
  const x = (permits) => left + (permits / c.max) * (w - left - right);
  const y = (ms) => h - bottom - (ms / c.cold_ms) * (h - bottom - top);
  const text = (at, anchor, t) => svg("text", { x: at[0], y: at[1], "text-anchor": anchor }, t);
  box.replaceChildren(svg("svg", { class: "curve", viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": "The warm-up curve, described below" },
    svg("path", { class: "axis", d: `M${left} ${top}V${h - bottom}H${w - right}` }),
    svg("path", { class: "line", d: `M${x(0)} ${y(c.stable_ms)}L${x(c.threshold)} ${y(c.stable_ms)}L${x(c.max)} ${y(c.cold_ms)}` }),
    svg("circle", { class: "here", cx: x(c.stored), cy: y(c.now_ms), r: 5 }),
    text([left - 6, y(c.cold_ms) + 4], "end", span(c.cold_ms)), text([left - 6, y(c.stable_ms) + 4], "end", span(c.stable_ms)),
    text([left, h - 6], "middle", "warm"), text([w - right, h - 6], "end", "cold: permits saved up")));
}
