// One stream of events from the console, and what is said of it at the top of the page.
import { problems } from "./dom.js";
import { time } from "./format.js";

const late = 8000; // milliseconds without news: the stream is not live

// follow calls handlers[event](data) for each event, and keeps the word at the top true. A page that nobody sees has no stream: a browser
// has six connections to a host, and a seventh page would wait for one.
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
          say("lost", "not shown: load the page again"); // what is on the page is old
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
      else if (Date.now() - heard > late) say("lost", heard ? `not connected since ${time(heard)}` : "not connected");
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
