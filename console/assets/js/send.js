import { fullTime } from "./format.js";

// send makes one request that changes something. The console refuses it without the page's token.
export async function send(what, order) {
  const token = document.querySelector('meta[name="csrf"]')?.content ?? "";
  const answer = await fetch(`api/${what}`, {
    method: "POST", headers: { "Content-Type": "application/json", "X-Csrf-Token": token }, body: JSON.stringify(order),
  });
  const said = await answer.json().catch(() => ({ error: `The console answered ${answer.status}.` }));
  if (said.at) said.error = said.error.replace(said.clock, () => fullTime(Date.parse(said.at))); // in the reader's zone
  if (!answer.ok) throw Object.assign(new Error(said.error), { status: answer.status, changes: said.changes });
  return said.done;
}
