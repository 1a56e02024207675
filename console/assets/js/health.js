// The page Health.
import { element, problems, rows, setText, stamp } from "./dom.js";
import { ago, count, fullTime, number, shown } from "./format.js";
import { follow } from "./stream.js";

const by = (id) => document.getElementById(id);

function show(h) {
  problems(h.problems);
  if (!by("instances")) { location.reload(); return; } // the page was served without figures
  setText(by("switch"), h.switch);
  const turn = document.querySelector('[data-act="switch"]');
  if (turn && (turn.dataset.on === "yes") !== h.off && !document.querySelector("dialog")) location.reload(); // the switch was turned elsewhere
  const now = Date.parse(h.at);
  const since = (t) => element("time", { datetime: t, title: fullTime(Date.parse(t)) }, ago(now - Date.parse(t)));
  const figure = (v) => ({ text: number(v), class: "number" });
  rows(by("instances").tBodies[0], h.instances.map((i) => [
    i.name, i.problem ? element("strong", { class: "bad" }, i.problem) : i.ended ? "ended" : "ok", i.missed ? `${i.store}; ${i.missed}` : i.store,
    `${count(i.limits)} in all; ${i.loads}`, figure(i.granted), figure(i.refused), since(i.beat), since(i.started), i.version,
  ]), "No instance has reported yet.", 9);
  rows(by("rejected").tBodies[0], h.rejected.map((r) => [r.row ?? "", shown(r.name ?? ""), r.field ?? "", { text: shown(r.value ?? ""), class: "code" }, r.want ?? r.err ?? "", r.consequence ?? ""]), "None.", 6);
  by("events").replaceChildren(...(h.events.length ? h.events.map((e) => element("li", {},
    stamp(e.at * 1000), " ", element("span", { class: "tag" }, e.kind), " ", e.text)) : [element("li", { class: "muted" }, h.no_events || "None.")]));
}

export function start() {
  follow("stream/health", { health: show });
}
