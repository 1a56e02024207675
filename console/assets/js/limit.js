// The page of one limit.
import { Chart } from "./chart.js";
import { drawCurve } from "./curve.js";
import { element, problems, rows, setText, stamp, tags } from "./dom.js";
import { count, fullTime, number, shown, span, time } from "./format.js";
import { drawTrend, newTrend } from "./spark.js";
import { follow } from "./stream.js";
import { param, setParam } from "./state.js";

const name = document.body.dataset.name;
const live = 15 * 60; // seconds; the present is added to a chart of at most this length
const refresh = 60_000; // milliseconds between readings of the history
const by = (id) => document.getElementById(id);
const figure = (text) => ({ text, class: "number" });

function tiles(list) {
  const box = by("tiles"), titles = list.map((t) => `${t.title}${t.past ? " over time" : ""}`).join("\n");
  if (box.dataset.titles !== titles) {
    box.dataset.titles = titles;
    box.replaceChildren(...list.map((t) => element("div", {}, element("dt", {}, t.title), element("dd"), element("dd"),
      t.of ? element("dd", { class: "use" }, element("progress", { "aria-hidden": "true" }), t.past ? newTrend() : null) : null)));
  }
  list.forEach((t, i) => {
    const [, value, unit, use] = box.children[i].children;
    value.className = `number ${t.tone}`;
    setText(value, t.value);
    setText(unit, t.unit);
    if (use) Object.assign(use.firstChild, { max: t.of, value: t.used }).dataset.tone = t.tone;
    if (t.past) drawTrend(use.lastChild, t.past, t.of);
  });
}

function show(d) {
  problems(d.problems);
  setText(by("config"), d.known ? d.config : "No instance has reported a limit of this name.");
  tags(by("state"), d.state);
  by("state").title = d.held ? `held back until ${fullTime(d.held)}` : "";
  by("held").hidden = !d.held;
  setText(by("held"), d.held ? `Held back until ${time(d.held)}${d.held_by ? `, ${d.held_by}` : ""}.` : "");
  by("rejected").hidden = !d.rejected;
  setText(by("rejected"), d.rejected ?? "");
  tiles(d.tiles);
  for (const title of document.querySelectorAll("[data-refused]")) setText(title, d.shadow ? "Would refuse/s" : "Refused/s");
  rows(by("shares").tBodies[0], d.shares.map((s) => [
    s.instance, figure(number(s.granted)), figure(number(s.refused)), figure(count(s.waiting)), figure(s.oldest_ms ? span(s.oldest_ms) : "–"),
    element("span", {}, s.config, s.problem ? element("strong", { class: "bad" }, ` ${s.problem}`) : null),
  ]), "No instance.", 6);
  by("priorities-card").hidden = !d.priorities;
  if (d.priorities) {
    rows(by("priorities").tBodies[0], d.priorities.map((p) => [
      p.name, figure(number(p.granted)), figure(number(p.refused)), figure(count(p.waiting)), figure(p.p99_ms ? span(p.p99_ms) : "–"),
    ]));
  }
  rows(by("keys").tBodies[0], d.keys.map((k) => [{ text: shown(k.key), class: "code" }, figure(k.error ? `${count(k.count)}, or up to ${count(k.error)} less` : count(k.count))]), d.no_keys, 2);
  if (d.bucket) {
    setText(by("bucket-key"), shown(d.bucket.key));
    rows(by("bucket").tBodies[0], d.bucket.fields.map(([k, v]) => [{ text: k, class: "code" }, { text: v, class: "code" }]), d.bucket.problem || "Not in use: there is no such key.", 2);
  }
  by("curve-card").hidden = !d.curve;
  if (d.curve) {
    drawCurve(by("curve"), d.curve);
    setText(by("curve-text"), `${number(d.curve.stored)} of ${number(d.curve.max)} permits are saved up: the next one takes ${span(d.curve.now_ms)}, between ${span(d.curve.stable_ms)} warm and ${span(d.curve.cold_ms)} cold.`);
  }
}

async function past(range) {
  const answer = await fetch(`api/history?range=${range}&name=${encodeURIComponent(name)}`);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}

// listMarks shows the events of the period, or why they are not known.
function listMarks(marks, unknown) {
  by("marks").replaceChildren(...(unknown ? [element("li", { class: "muted" }, unknown)] : marks.length ? marks.slice().reverse().map((m) => element("li", {}, stamp(m.at * 1000), " ", m.text))
    : [element("li", { class: "muted" }, "None in this period.")]));
}

export function start() {
  let chart, range = param("range") ?? "15m", asked = 0;
  const load = async () => {
    const now = ++asked;
    let data = { at: [], granted: [], refused: [], waited: [], rate: [], marks: [] }, unknown = "";
    try {
      data = await past(range);
    } catch (e) {
      unknown = `Not known: ${e.message}`;
      problems([{ text: `The history cannot be shown: ${e.message}` }]);
    }
    if (now !== asked) return; // another period was chosen meanwhile
    if (chart && chart.range === range && range === "15m") chart.data.marks = data.marks; // this chart has newer points than the history
    else if (chart) chart.set(data);
    else chart = new Chart(by("chart"), data);
    chart.range = range;
    listMarks(data.marks, unknown);
  };
  const choose = (to) => {
    range = to;
    for (const b of by("ranges").children) b.setAttribute("aria-pressed", String(b.dataset.range === to));
    load();
  };
  by("ranges").hidden = false;
  by("ranges").addEventListener("click", (e) => {
    const to = e.target.dataset?.range;
    if (!to) return;
    setParam("range", to === "15m" ? "" : to);
    choose(to);
  });
  choose(["15m", "1h", "1d"].includes(range) ? range : "15m");
  setInterval(load, refresh);
  follow(`stream/limit?name=${encodeURIComponent(name)}`, {
    limit: (d) => {
      show(d);
      chart?.called(d.shadow ? "Would be refused" : "Refused");
      if (d.measured && chart?.range === "15m") chart.add(Math.round(d.at / 1000), { ...d.figures, rate: d.figures.rate || null }, live);
    },
  });
}
