// A sparkline: granted and refused calls of the last minute, on one scale.
import { svg } from "./dom.js";

const most = 30, width = 100, height = 30;

export function newSpark() {
  const granted = svg("path", { class: "granted" }), refused = svg("path", { class: "refused" });
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, granted, refused);
}

// draw shows pairs of granted and refused, the oldest first.
export function drawSpark(spark, pairs) {
  const n = pairs.length / 2;
  const top = Math.max(...pairs, 1e-9);
  const path = (from) => {
    let d = "";
    for (let i = 0; i < n; i++) {
      const x = width - (n - 1 - i) * (width / (most - 1)), y = height - 1 - (pairs[2 * i + from] / top) * (height - 3);
      d += `${d ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    }
    return d;
  };
  spark.firstChild.setAttribute("d", n > 1 ? path(0) : "");
  spark.lastChild.setAttribute("d", n > 1 && pairs.some((v, i) => i % 2 && v) ? path(1) : "");
}

export function newTrend() {
  return svg("svg", { class: "trend", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path"));
}

// drawTrend shows usage over time, the oldest first, as an area on a scale up to the bound.
export function drawTrend(trend, values, bound) {
  const top = Math.max(bound, ...values, 1e-9), last = Math.max(values.length - 1, most - 1); // a few values do not fill the width
  const x = (i) => (width - (values.length - 1 - i) * (width / last)).toFixed(1);
  const line = values.map((v, i) => `L${x(i)} ${(height - (v / top) * (height - 1)).toFixed(1)}`).join("");
  trend.firstChild.setAttribute("d", values.length > 1 ? `M${x(0)} ${height}${line}L${width} ${height}Z` : "");
}

// push appends a beat to pairs.
export function push(pairs, granted, refused) {
  pairs.push(granted, refused);
  if (pairs.length > 2 * most) pairs.splice(0, 2);
}
