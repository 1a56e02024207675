// The stream of events from the console, and its state at the top of the page.
import { problems } from "./dom.js";
import { time } from "./format.js";

const late = 8000; // milliseconds without an event until the stream counts as lost

// follow calls handlers[event](data) for each event, and keeps the state at the top up to date. A hidden page has no stream,
// because a browser has six connections per host, and a seventh page would wait for one.
export function follow(url, handlers) {
  const live = document.getElementById("live");
  let heard = 0, state = "", source;
  const say = (now, text) => {
    if (state === now + text) return;
    state = now + text;
    live.dataset.state = now;
    live.textContent = text;
  };
  const open = () => {
    if (source) return;
    say("wait", "connecting …");
    heard = 0;
    const own = source = new EventSource(url);
    for (const [name, handle] of Object.entries(handlers)) {
      own.addEventListener(name, (e) => {
        heard = Date.now();
        try {
          handle(JSON.parse(e.data));
        } catch (error) {
          say("lost", "not shown: load the page again"); // the figures on the page are old
          throw error;
        }
        say("live", "live");
      });
    }
    own.addEventListener("lost", (e) => {
      heard = Date.now();
      say("lost", "no figures");
      problems([{ text: JSON.parse(e.data) }]);
    });
    own.onerror = () => {
      if (own !== source) return;
      if (own.readyState === EventSource.CLOSED) say("lost", "not connected: load the page again");
      else if (Date.now() - heard > late) say("lost", heard ? `no connection since ${time(heard)}` : "not connected");
    };
  };
  const close = () => {
    source?.close();
    source = undefined;
    heard = 0;
  };
  setInterval(() => {
    if (heard && Date.now() - heard > late) say("lost", `no news since ${time(heard)}`);
  }, 1000);
  const look = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", close);
  addEventListener("pageshow", look);
  look();
}
