// The screen of one limit.
import { Chart } from "./chart.js";
import { drawCurve } from "./curve.js";
import { element, problems, rows, setText, tags } from "./dom.js";
import { count, fullTime, number, span, time } from "./format.js";
import { follow } from "./stream.js";

const name = document.body.dataset.name;
const minutes = 15 * 60; // seconds in the live chart
const refresh = 60_000; // milliseconds: the day's chart
const by = (id) => document.getElementById(id);

function tiles(f) {
  const box = by("tiles");
  if (!box.children.length) {
    const tile = (title, key, unit, tone = "", unitKey) => element("div", {}, element("dt", {}, title),
      element("dd", { class: `number ${tone}`, "data-tile": key }), element("dd", { "data-tile": unitKey }, unit));
    box.append(tile("Rate in force", "rate", "/s"), tile("Granted", "granted", "/s", "good"), tile("Refused", "refused", "/s", "bad"),
      tile("Waited", "waited", "/s"), tile("p99 wait", "p99_ms", "ms"), tile("Waiting now", "waiting", "", "", "oldest"), tile("Saved up", "stored", "", "", "max"));
  }
  const texts = { ...Object.fromEntries(Object.entries(f).map(([k, v]) => [k, number(v)])), oldest: f.oldest_ms ? `oldest ${span(f.oldest_ms)}` : "", max: `of ${number(f.max)}`, waiting: count(f.waiting) };
  if (!f.rate) texts.rate = "–";
  for (const e of box.querySelectorAll("[data-tile]")) if (e.dataset.tile in texts) setText(e, texts[e.dataset.tile]);
}

function show(d, chart) {
  problems(d.problems);
  setText(by("config"), d.known ? d.config : "No instance has reported a limit of this name.");
  setText(by("uses"), d.uses);
  tags(by("state"), d.state);
  by("state").title = d.held ? `held back until ${fullTime(d.held)}` : "";
  by("rejected").hidden = !d.rejected;
  setText(by("rejected"), d.rejected ?? "");
  tiles(d.figures);
  if (d.measured) chart?.add(Math.round(d.at / 1000), { ...d.figures, rate: d.figures.rate || null }, minutes);
  const figure = (text) => ({ text, class: "number" });
  rows(by("shares").tBodies[0], d.shares.map((s) => [
    s.instance, figure(number(s.granted)), figure(number(s.refused)), figure(s.waiting), figure(s.oldest_ms ? span(s.oldest_ms) : ""),
    element("span", {}, s.config, s.problem ? element("strong", { class: "bad" }, ` ${s.problem}`) : null),
  ]), "No instance.", 6);
  rows(by("keys").tBodies[0], d.keys.map((k) => [{ text: k.key, class: "code" }, figure(k.error ? `${k.count} (±${k.error})` : k.count)]), "Nobody was refused.", 2);
  if (d.bucket) {
    setText(by("bucket-key"), d.bucket.key);
    rows(by("bucket").tBodies[0], d.bucket.fields.map(([k, v]) => [{ text: k, class: "code" }, { text: v, class: "code" }]), d.bucket.problem || "Not in use: there is no such key.", 2);
  }
  by("curve-card").hidden = !d.curve;
  if (d.curve) {
    drawCurve(by("curve"), d.curve);
    setText(by("curve-text"), `${number(d.curve.stored)} of ${number(d.curve.max)} permits are saved up: the next one takes ${span(d.curve.now_ms)}, between ${span(d.curve.stable_ms)} warm and ${span(d.curve.cold_ms)} cold.`);
  }
}

async function past(spanName) {
  const answer = await fetch(`api/history?span=${spanName}&name=${encodeURIComponent(name)}`);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}

function listMarks(marks) {
  const box = by("marks");
  if (!marks.length) return;
  box.replaceChildren(...marks.slice().reverse().map((m) =>
    element("li", {}, element("time", { datetime: new Date(m.at * 1000).toISOString(), title: fullTime(m.at * 1000) }, time(m.at * 1000)), m.text)));
}

export function start() {
  let live, day, waiting;
  const empty = () => ({ at: [], granted: [], refused: [], waited: [], rate: [], marks: [] });
  follow(`stream/limit?name=${encodeURIComponent(name)}`, { limit: (d) => { waiting = d; show(d, live); } });
  const load = async () => {
    try {
      const [m, d] = await Promise.all([live ? null : past("minutes"), past("day")]);
      if (!live) live = new Chart(by("minutes"), m);
      if (day) day.set(d);
      else day = new Chart(by("day"), d);
      live.data.marks = d.marks;
      listMarks(d.marks);
    } catch (e) {
      live ??= new Chart(by("minutes"), empty());
      problems([`The history cannot be shown: ${e.message}`]);
    }
    if (waiting) show(waiting, live);
  };
  load();
  setInterval(load, refresh);
}
