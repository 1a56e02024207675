// Actions that change something besides a row. A button opens a dialog that names the consequence and asks for a reason.
import { element } from "./dom.js";
import { shown } from "./format.js";
import { send } from "./send.js";

const name = document.body.dataset.name, title = shown(name);

// What a state of the switch means, also after an undo.
const switched = {
  on: "Limits apply again to every call of the whole fleet, within about a second.",
  off: "Every call of the whole fleet passes, without any limit, within about a second: the upstreams get all of it.",
};
const undone = {
  on: `This turns the switch on. ${switched.on} If the switch was turned since, nothing is written.`,
  off: `This turns the switch off. ${switched.off} If the switch was turned since, nothing is written.`,
};

const acts = {
  penalize: () => ({
    title: `Hold back ${title}?`, danger: "Hold back",
    says: "No call of this limit gets a permit in the whole fleet until the time is over. Calls that wait now wait longer, or are refused. Only a reset can undo this.",
    fields: [["seconds", "Duration in seconds", { type: "number", min: "1", max: "3600", value: "30", required: true }]],
    order: (f) => ({ name, seconds: Number(f.seconds), why: f.why }),
  }),
  reset: () => ({
    title: `Reset ${title}?`, danger: "Reset",
    says: "The bucket starts again, in the whole fleet, without its stored permits, its reservations and its penalty. Waiting calls ask again. For a moment, up to a full bucket more than the rate may pass.",
    order: (f) => ({ name, why: f.why }),
  }),
  switch: (button) => {
    const on = button.dataset.on === "yes";
    return {
      title: on ? "Turn the switch on?" : "Turn the switch off?", danger: on ? "Turn on" : "Turn off", says: switched[on ? "on" : "off"],
      order: (f) => ({ on, why: f.why }),
    };
  },
  confirm: () => ({
    title: "Confirm that limits are gone?", danger: "Confirm",
    says: "The whole fleet accepts the table as it is now: limits whose rows are gone are no longer in force, and the loss is no longer reported.",
    order: (f) => ({ why: f.why }),
  }),
  undo: (button) => ({
    title: `Undo change ${button.dataset.id}?`, danger: "Undo",
    says: undone[button.dataset.turns] ?? "The row gets its values from before this change. The whole fleet applies them within one load interval of the gateways. If the row was changed since, nothing is written.",
    order: (f) => ({ id: Number(button.dataset.id), why: f.why }),
  }),
  remove: (button) => ({
    title: `Remove ${title}?`, danger: "Remove",
    says: "The row is deleted from the table. Calls of this name then have no limit of their own: each gateway's option --unknown decides about them. The removal can be undone.",
    order: (f) => ({ name, from: button.dataset.from, why: f.why }),
  }),
};

// leave reloads the page, which then shows the result.
export function leave(done) {
  try { sessionStorage.setItem("tokenbucket-done", done); } catch { /* the page shows the change anyway */ }
  location.reload();
}

// showDone shows the result of the action before the reload.
export function showDone() {
  const box = document.getElementById("done");
  try {
    box.textContent = sessionStorage.getItem("tokenbucket-done") ?? "";
    sessionStorage.removeItem("tokenbucket-done");
  } catch { /* storage may be forbidden */ }
  box.hidden = !box.textContent;
}

// confirm asks, sends the request, and reloads the page.
export function confirm(what, button) {
  const about = acts[what](button);
  const field = ([id, label, more]) => element("label", {}, label, element("input", { name: id, autocomplete: "off", ...more }));
  const failed = element("p", { class: "error", role: "alert" });
  const go = element("button", { class: "button danger" }, about.danger);
  const form = element("form", { method: "dialog" },
    element("h2", { id: "ask-title" }, about.title), element("p", { id: "ask-says" }, about.says),
    element("div", { class: "form" }, ...[...(about.fields ?? []), ["why", "Reason", { required: true, maxlength: "2000" }]].map(field)),
    failed, element("menu", {}, element("button", { type: "button", class: "button", value: "no" }, "Cancel"), go));
  const dialog = element("dialog", { "aria-labelledby": "ask-title", "aria-describedby": "ask-says" }, form);
  form.querySelector('[value="no"]').addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { dialog.remove(); button.focus(); });
  form.addEventListener("submit", async (e) => {
    e.preventDefault();
    go.disabled = true;
    try {
      leave(await send(what, about.order(Object.fromEntries(new FormData(form)))));
    } catch (error) {
      failed.textContent = error.message;
      go.disabled = false;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  form.querySelector("input").focus();
}

export function bind() {
  document.addEventListener("click", (e) => {
    const button = e.target.closest?.("[data-act]");
    if (button) confirm(button.dataset.act, button);
  });
}
