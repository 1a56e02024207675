// The screen Change: what a row would mean, while it is written, and saving it against the version that was read.
import { confirm } from "./act.js";
import { element } from "./dom.js";
import { send } from "./send.js";

const name = document.body.dataset.name;
const form = document.getElementById("form"), said = document.getElementById("preview"), failed = document.getElementById("error"), why = document.getElementById("why");
const inputs = form ? [...form.querySelectorAll("input[name]")] : [];

// An empty field is NULL.
const value = (i) => (i.value.trim() === "" ? null : i.value.trim());
// What a field cannot hold, a line break or blanks around it, does not count as a change: nobody has made it.
const changed = (i) => i.value.trim() !== i.dataset.was.replace(/[\r\n]/g, "").trim();
const values = (list) => Object.fromEntries(list.map((i) => [i.name, value(i)]));

let asked = 0;
async function foresee() {
  const now = ++asked;
  if (!inputs.some(changed)) return;
  try {
    const answer = await fetch(`api/preview?name=${encodeURIComponent(name)}&values=${encodeURIComponent(JSON.stringify(values(inputs)))}`);
    const d = await answer.json();
    if (now !== asked) return; // something else was written meanwhile
    if (d.error) said.replaceChildren(element("span", { class: "error" }, d.error));
    else said.replaceChildren(element("strong", {}, d.text), ...d.notes.map((n) => element("p", { class: "muted" }, n)));
  } catch { /* the preview is a help, and the console says itself that it is away */ }
}

async function act(what, order, button) {
  if (!why.reportValidity()) return;
  button.disabled = true;
  failed.textContent = "";
  try {
    await send(what, { name, from: form.dataset.from, why: why.value, ...order });
    location.reload();
  } catch (error) {
    failed.textContent = error.message;
    if (error.status === 409) failed.append(" ", element("a", { href: location.href }, "Load what it says now"));
    button.disabled = false;
  }
}

export function start() {
  if (!form) return;
  let timer;
  form.addEventListener("input", (e) => {
    if (e.target === why) return;
    clearTimeout(timer);
    timer = setTimeout(foresee, 250);
  });
  form.addEventListener("submit", (e) => {
    e.preventDefault();
    const list = form.dataset.from ? inputs.filter(changed) : inputs.filter((i) => value(i) !== null);
    if (!list.length) { failed.textContent = "Nothing is changed yet."; return; }
    act("save", { values: values(list) }, document.getElementById("save"));
  });
  const shadow = document.getElementById("shadow");
  shadow?.addEventListener("click", () => act("shadow", { on: shadow.dataset.on === "yes" }, shadow));
  const remove = document.getElementById("remove");
  remove?.addEventListener("click", () => { remove.dataset.from = form.dataset.from; confirm("remove", remove); });
}
