// One stream of events from the console, and what is said of it at the top of the page.
import { problems } from "./dom.js";
import { time } from "./format.js";

const late = 8000; // milliseconds without news: the stream is not live

// follow calls handlers[event](data) for each event, and keeps the word at the top true.
export function follow(url, handlers) {
  const live = document.getElementById("live");
  let heard = 0, state = "";
  const say = (now, text) => {
    if (state === now + text) return;
    state = now + text;
    live.dataset.state = now;
    live.textContent = text;
  };
  say("wait", "connecting …");
  const source = new EventSource(url);
  const hear = () => { heard = Date.now(); say("live", "live"); };
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (e) => { hear(); handle(JSON.parse(e.data)); });
  }
  source.addEventListener("lost", (e) => {
    heard = Date.now();
    say("lost", "no figures");
    problems([`Nothing is known of the fleet now: ${JSON.parse(e.data)}`]);
  });
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) say("lost", "not connected: load the page again");
    else if (Date.now() - heard > late) say("lost", heard ? `not connected since ${time(heard)}` : "not connected");
  };
  setInterval(() => {
    if (heard && Date.now() - heard > late) say("lost", `no news since ${time(heard)}`);
  }, 1000);
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (e) => { if (e.persisted) location.reload(); });
  return source;
}
