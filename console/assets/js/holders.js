// The page Semaphores and windows.
import { element, problems, rows } from "./dom.js";
import { count, exact, fullTime, shown, span } from "./format.js";
import { follow } from "./stream.js";

const by = (id) => document.getElementById(id);
const figure = (text) => ({ text, class: "number" });

// use shows the usage of a bound as a bar and in words.
function use(name, used, of, ...words) {
  const tone = used >= of ? "bad" : used >= 0.8 * of ? "warm" : "";
  return element("div", { class: "use" }, element("h3", { class: "name" }, shown(name)),
    element("progress", { value: used, max: of, "data-tone": tone, "aria-hidden": "true" }),
    element("p", {}, element("b", {}, count(used)), ` of ${count(of)}`, ...words, used >= of ? ", full" : ""));
}

const titles = ["Holder", "Permits", "Held for", "Lease ends", "Fence"];

function holders(s, at) {
  if (!s.holders?.length) return null;
  const table = element("table", { class: "stack" }, element("thead", {}, element("tr", {}, ...titles.map((t) =>
    element("th", { scope: "col", class: t === "Holder" || t === "Lease ends" ? "" : "number" }, t)))), element("tbody"));
  rows(table.tBodies[0], s.holders.map((h) => {
    const ends = Date.parse(h.expires);
    return [
      shown(h.label ?? ""), figure(count(h.permits)), figure(span(Math.max(0, at - Date.parse(h.since)))),
      h.expires ? element("time", { datetime: h.expires, title: fullTime(ends) }, ends > at ? `in ${span(ends - at)}` : "now") : "–", figure(h.fence),
    ];
  }), "None.", titles.length);
  return table;
}

function show(d) {
  problems(d.problems);
  if (!by("semaphores")) { location.reload(); return; } // the page was served without figures
  const at = Date.parse(d.at), none = (what) => [element("p", { class: "muted" }, `No instance has reported a ${what}.`)];
  by("semaphores").replaceChildren(...(d.semaphores.length ? d.semaphores.flatMap((s) => [
    use(s.name, s.used ?? 0, s.permits, ...(s.waiting ? [", ", element("b", {}, count(s.waiting)), " waiting"] : [])),
    holders(s, at) ?? "", s.more_holders ? element("p", { class: "muted" }, `and ${count(s.more_holders)} more`) : "",
  ]) : none("semaphore")));
  by("windows").replaceChildren(...(d.windows.length
    ? d.windows.map((w) => use(w.name, w.used ?? 0, w.limit, ` in the last ${exact((w.length ?? 0) / 1e6)}`)) : none("window")));
}

export function start() {
  follow("stream/holders", { holders: show });
}
