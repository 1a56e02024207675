// What all pages share; it loads the module of the page's screen.
import { showTimes } from "./format.js";
import { bind, showDone } from "./act.js";
import { problems } from "./dom.js";
import { follow } from "./stream.js";

const screens = {
  limits: "./limits.js", limit: "./limit.js", health: "./health.js", holders: "./holders.js", change: "./change.js",
};

function themeButton() {
  const button = document.getElementById("theme");
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Change to ${button.textContent.toLowerCase()} colours`); };
  button.addEventListener("click", () => {
    const theme = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("tokenbucket-theme", theme); } catch { /* the theme then holds for this page only */ }
    label();
    document.dispatchEvent(new Event("theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); document.dispatchEvent(new Event("theme")); });
  button.hidden = false;
  label();
}

themeButton();
showTimes(document);
bind();
showDone();
const screen = screens[document.body.dataset.screen];
if (screen) (await import(screen)).start();
if (["change", "changes"].includes(document.body.dataset.screen)) follow("stream/problems", { problems });
