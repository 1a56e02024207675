// The page Limits: all limits as they are now, the most refused first.
import { element, problems, setText, tags } from "./dom.js";
import { briefTime, count, number, share, shown, span, time } from "./format.js";
import { drawSpark, newSpark, push } from "./spark.js";
import { param, setParam } from "./state.js";
import { follow } from "./stream.js";
import { VirtualList } from "./table.js";

// The order of a row's figures in a frame: see figures in board.go.
const fields = ["rate", "granted", "refused", "waiting", "fill", "p99", "state", "held", "holder", "uses"];
const resort = 10_000; // milliseconds between sorts while the pointer is elsewhere

const filter = document.getElementById("filter"), found = document.getElementById("found"), box = document.getElementById("rows");
let empty = "", limits = [], order = [], sorted = 0, measured = false, list;
const sort = { by: "refused", down: true };
const usual = "-refused"; // the order if the address has none

function makeRow() {
  const cell = (name, ...children) => element("span", { role: "cell", class: `c-${name}${numeric.has(name) ? " number" : ""}` }, ...children);
  return element("div", { role: "row" },
    cell("name", element("a"), element("small")), cell("spark", newSpark()), ...["rate", "granted", "refused", "waiting", "fill", "p99", "state"].map((n) => cell(n)));
}
const rates = ["granted", "refused", "unlimited", "unlimited_refused"]; // the totals that are rates
const numeric = new Set(["rate", "granted", "refused", "waiting", "fill", "p99"]);

function fillRow(row, index) {
  const l = limits[order[index]];
  const [name, spark, rate, granted, refused, waiting, fill, p99, state] = row.children;
  if (row.dataset.name !== l.name) {
    row.dataset.name = l.name;
    name.firstChild.textContent = shown(l.name);
    name.firstChild.title = shown(l.name);
    name.firstChild.href = `limit?name=${encodeURIComponent(l.name)}`;
  }
  setText(name.lastChild, l.uses ? `${l.config} · ${l.uses}` : l.config);
  if (spark.drawn !== l.beat || spark.of !== l.name) {
    drawSpark(spark.firstChild, l.spark);
    Object.assign(spark, { drawn: l.beat, of: l.name });
  }
  setText(rate, l.rate ? number(l.rate) : "–");
  setText(granted, l.granted == null ? "–" : number(l.granted));
  const tried = l.refused > 0 && l.state.split(", ").includes("shadow"); // these calls would be refused, and pass
  setText(refused, l.refused == null ? "–" : tried ? `(${number(l.refused)})` : number(l.refused));
  refused.title = tried ? "would be refused; the row is in shadow" : "";
  refused.classList.toggle("bad", l.refused > 0 && !tried);
  setText(waiting, count(l.waiting));
  waiting.toggleAttribute("data-none", !l.waiting);
  setText(fill, share(l.fill));
  setText(p99, l.p99 ? span(l.p99) : "–");
  tags(state, l.state, l.held ? { penalised: `penalised until ${briefTime(l.held)}` } : {});
  if (l.held) state.title = `held back until ${time(l.held)}${l.holder ? `, ${l.holder}` : ""}`;
  else state.title = l.state;
}

function take(l, figures) {
  fields.forEach((f, i) => { l[f] = figures[i]; });
}

// arrange filters and sorts the list.
function arrange() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  order = [];
  // A word that begins with a slash is a part of a name, and not of a rate such as 5/s.
  const has = (l, w) => (w.length > 1 && w.startsWith("/") ? l.name.toLowerCase().includes(w) : l.text.includes(w) || l.state.includes(w));
  limits.forEach((l, i) => { if (words.every((w) => has(l, w))) order.push(i); });
  const sign = sort.down ? -1 : 1;
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  order.sort((i, j) => {
    const a = limits[i], b = limits[j];
    return sign * compare(a[sort.by], b[sort.by]) || compare(b.refused, a.refused) || compare(b.granted, a.granted) || compare(a.name, b.name);
  });
  sorted = Date.now();
  document.getElementById("limits").setAttribute("aria-rowcount", order.length + 1);
  const all = `${count(limits.length)} ${limits.length === 1 ? "limit" : "limits"}`;
  setText(found, words.length ? `${count(order.length)} of ${all}` : all);
  show();
}

function show() {
  list.setLength(order.length);
  let none = box.querySelector(".none");
  if (order.length) none?.remove();
  else {
    if (!none) box.append(none = element("div", { class: "row none", role: "row" }, element("span", { role: "cell" })));
    setText(none.firstChild, limits.length ? "No limit matches the filter in its name, configuration or state." : empty);
    none.firstChild.classList.toggle("bad", !limits.length);
  }
}

// strip shows the notices. The element of a link is kept while its notice lasts, because the reader may be about to click it;
// others are added and removed around it.
function strip(list) {
  const box = document.getElementById("strip"), before = new Map();
  if (!list.length) {
    if (!box.querySelector(".well")) box.replaceChildren(element("li", { class: "well" }, "Nothing unusual."));
    return;
  }
  for (const item of [...box.children]) {
    if (item.dataset.notice && !before.has(item.dataset.notice)) before.set(item.dataset.notice, item);
    else item.remove();
  }
  const items = list.map((n) => {
    const notice = `${n.tone} ${n.link}`, item = before.get(notice);
    before.delete(notice);
    return item ?? element("li", { "data-notice": notice }, element("a", { href: n.link, "data-tone": n.tone }, element("span"), " ", element("b")));
  });
  before.forEach((item) => item.remove());
  items.forEach((item, i) => {
    if (box.children[i] !== item) box.insertBefore(item, box.children[i] ?? null);
  });
  list.forEach((n, i) => {
    const [text, calls] = box.children[i].firstChild.children;
    setText(text, n.text);
    setText(calls, n.calls);
  });
}

function common(frame) {
  empty = frame.totals.empty ?? "";
  document.getElementById("others").classList.toggle("bad", Boolean(empty));
  problems(frame.problems);
  strip(frame.strip ?? []);
  for (const e of document.querySelectorAll("[data-total]")) {
    const known = frame.totals.measured || !rates.includes(e.dataset.total);
    setText(e, known ? (rates.includes(e.dataset.total) ? number : count)(frame.totals[e.dataset.total]) : "–");
  }
}

function all(frame) {
  const before = new Map(limits.map((l) => [l.name, l]));
  limits = frame.rows.map(([name, config, ...figures], i) => {
    const l = { name, config, text: `${name} ${config}`.toLowerCase(), beat: frame.at, spark: frame.sparks?.[i] ?? before.get(name)?.spark ?? [] };
    take(l, figures);
    return l;
  });
  measured = frame.totals.measured;
  common(frame);
  arrange();
}

function some(frame) {
  for (const [i, figures] of Object.entries(frame.changed ?? {})) take(limits[i], figures);
  for (const l of limits) {
    if (!l.spark.length && !l.granted && !l.refused) continue;
    push(l.spark, l.granted, l.refused);
    l.beat = frame.at;
  }
  common(frame);
  const reading = box.matches(":hover") || box.contains(document.activeElement);
  const first = frame.totals.measured && !measured;
  measured = frame.totals.measured;
  if (first || !reading && Date.now() - sorted > resort) arrange();
  else show();
}

function sortable(title) {
  const button = element("button", { type: "button" }, title.textContent);
  title.replaceChildren(button);
  button.addEventListener("click", () => {
    const by = title.dataset.sort;
    orderBy(by, sort.by === by ? !sort.down : by !== "name" && by !== "state");
    const now = (sort.down ? "-" : "") + sort.by;
    setParam("sort", now === usual ? "" : now);
    arrange();
    box.scrollTop = 0;
  });
}

// orderBy sorts by an existing column.
function orderBy(by, down) {
  const title = document.querySelector(`[data-sort="${CSS.escape(by)}"]`);
  if (!title) return;
  Object.assign(sort, { by, down });
  for (const t of document.querySelectorAll("[data-sort]")) t.removeAttribute("aria-sort");
  title.setAttribute("aria-sort", down ? "descending" : "ascending");
}

function bindFilter() {
  filter.disabled = false;
  filter.value = param("q") ?? "";
  const by = param("sort") ?? usual;
  orderBy(by.replace(/^-/, ""), by.startsWith("-"));
  filter.addEventListener("input", () => {
    setParam("q", filter.value);
    arrange();
    box.scrollTop = 0;
  });
  filter.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { filter.value = ""; setParam("q", ""); arrange(); }
    if (e.key === "ArrowDown" && order.length) { e.preventDefault(); list.focus(0); }
  });
  document.addEventListener("keydown", (e) => {
    if (e.key === "/" && !e.target.matches("input, textarea, select")) { e.preventDefault(); filter.focus(); }
  });
}

// The rows in the page stay until the first figures arrive.
function first() {
  list = new VirtualList(box, { make: makeRow, fill: fillRow });
  document.querySelectorAll("[data-sort]").forEach(sortable);
  bindFilter();
}

export function start() {
  follow("stream", {
    all: (frame) => {
      if (!list) first();
      all(frame);
    },
    some,
  });
}
