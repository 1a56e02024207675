// The screen Semaphores and windows.
import { element, problems, rows, setText } from "./dom.js";
import { count, fullTime, span } from "./format.js";
import { follow } from "./stream.js";

const by = (id) => document.getElementById(id);
const figure = (text) => ({ text, class: "number" });

function table(titles, list, label) {
  const box = element("table", {}, element("thead", {}, element("tr", {}, ...titles.map((t) =>
    element("th", { scope: "col", class: t.right ? "number" : "" }, t.text)))), element("tbody"));
  rows(box.tBodies[0], list, "None.", titles.length);
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, box);
}

const right = (text) => ({ text, right: true });
const left = (text) => ({ text });

// held is for how long, and until when if nothing renews it.
function holders(s, at) {
  if (!s.holders?.length) return null;
  return table([right("Fence"), left("Label"), right("Permits"), right("Held for"), left("Lease ends")], s.holders.map((h) => {
    const ends = Date.parse(h.expires);
    return [
      figure(h.fence), h.label ?? "", figure(h.permits), figure(span(Math.max(0, at - Date.parse(h.since)))),
      h.expires ? element("time", { datetime: h.expires, title: fullTime(ends) }, ends > at ? `in ${span(ends - at)}` : "now") : "–",
    ];
  }), `Holders of ${s.name}`);
}

function show(d) {
  problems(d.problems);
  if (!by("semaphores")) { location.reload(); return; } // the page came without figures
  const at = Date.parse(d.at);
  if (by("semaphores").contains(document.activeElement)) return; // somebody scrolls there
  by("semaphores").replaceChildren(...(d.semaphores.length ? d.semaphores.map((s) => element("section", { class: "card" },
    element("h3", { class: "name" }, s.name),
    element("p", {}, `${count(s.used ?? 0)} of ${count(s.permits)} permits are held, ${count(s.waiting ?? 0)} ${s.waiting === 1 ? "waits" : "wait"}.`),
    holders(s, at), s.more_holders ? element("p", { class: "muted" }, `and ${count(s.more_holders)} more`) : null))
    : [element("p", { class: "card muted" }, "No instance has told of a semaphore.")]));
  if (d.windows.length) {
    by("windows").replaceChildren(table([left("Window"), right("Used"), right("Limit"), right("Length")],
      d.windows.map((w) => [w.name, figure(count(w.used ?? 0)), figure(count(w.limit)), figure(span((w.length ?? 0) / 1e6))]), "Windows"));
  } else setText(by("windows"), "No instance has told of a window.");
}

export function start() {
  follow("stream/holders", { holders: show });
}
