// The page Change: previews a row while it is edited, and saves it if it is still at the version that the page has.
import { confirm, leave } from "./act.js";
import { element, setText } from "./dom.js";
import { send } from "./send.js";

const name = document.body.dataset.name;
const by = (id) => document.getElementById(id);
const form = by("form"), failed = by("error"), why = by("why");
const inputs = form ? [...form.querySelectorAll("input[name], select[name]")] : [];

const isFlag = (i) => i.type === "checkbox";
// A line break or blanks around a value do not count as a change, because a field cannot hold them.
const chosen = (i) => [...i.options].find((o) => o.defaultSelected)?.value ?? "";
const changed = (i) => (isFlag(i) ? i.checked !== i.defaultChecked : i.options ? i.value !== chosen(i) : i.value.trim() !== i.defaultValue.replace(/[\r\n]/g, "").trim());
const before = (i) => (i.dataset.null ? null : i.dataset.was);

// entered returns the column's new value. An empty field is NULL.
function entered(i) {
  if (isFlag(i)) return i.checked ? "1" : "0";
  const text = i.value.trim(), scale = Number(i.dataset.scale ?? 1);
  if (text === "") return null;
  return scale === 1 || !Number.isFinite(Number(text)) ? text : (Number(text) / scale).toFixed(9).replace(/\.?0+$/, "");
}

const values = (list) => Object.fromEntries(list.map((i) => [i.name, changed(i) ? entered(i) : before(i)]));
const was = () => Object.fromEntries(inputs.map((i) => [i.name, before(i)]));

let asked = 0;
async function foresee() {
  const now = ++asked, some = inputs.some(changed);
  const list = form.dataset.from ? inputs : inputs.filter(changed);
  try {
    const answer = await fetch(`api/preview?name=${encodeURIComponent(name)}&values=${encodeURIComponent(JSON.stringify(values(list)))}`);
    const d = await answer.json();
    if (now !== asked) return; // the form was edited meanwhile
    if (d.now) setText(by("now"), d.now);
    const title = element("b", {}, "After the change: ");
    if (!some) by("preview").replaceChildren();
    else if (d.error) by("preview").replaceChildren(element("p", {}, title, element("span", { class: "error" }, d.error)));
    else by("preview").replaceChildren(element("p", {}, title, element("strong", {}, d.text)), ...(d.notes ?? []).map((n) => element("p", { class: "muted" }, n)));
  } catch { /* the preview is optional, and the stream reports a lost console */ }
}

async function act(what, order, button) {
  if (!why.reportValidity()) return;
  button.disabled = true;
  failed.replaceChildren();
  try {
    leave(await send(what, { name, from: form.dataset.from, was: was(), why: why.value, ...order }));
  } catch (error) {
    failed.append(element("p", {}, error.message));
    if (error.status === 409) {
      failed.append(element("ul", {}, ...(error.changes ?? []).map((c) => element("li", {}, c))), element("a", { href: location.href }, "Load the row as it is now"));
    }
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
    const list = inputs.filter(changed);
    if (!list.length) { failed.textContent = "No field has been changed yet."; return; }
    act("save", { values: values(list) }, by("save"));
  });
  const shadow = by("shadow");
  shadow?.addEventListener("click", () => act("shadow", { on: shadow.dataset.on === "yes", values: values(inputs.filter(changed)) }, shadow)); // with the edit
  const remove = by("remove");
  remove?.addEventListener("click", () => { remove.dataset.from = form.dataset.from; confirm("remove", remove); });
  foresee();
}
