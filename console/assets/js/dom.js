import { fullTime, time } from "./format.js";

// Elements are made without markup: names of limits come from others, and must never become HTML.
export function element(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") e.className = value;
    else if (value === true) e.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) e.setAttribute(name, value);
  }
  e.append(...children.filter((c) => c !== undefined && c !== null));
  return e;
}

export function svg(tag, attributes = {}, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);
  return e;
}

// setText leaves an equal text alone, which avoids a layout and an announcement by screen readers.
export function setText(e, text) {
  if (e && e.textContent !== String(text)) e.textContent = text;
}

// tags shows the labels of a state: its words, or the text given for a word.
export function tags(e, state, words = {}) {
  const text = (word) => words[word] ?? word;
  const list = state ? state.split(", ") : [];
  const shown = list.map(text).join();
  if (e.dataset.words === shown) return;
  e.dataset.words = shown;
  e.replaceChildren(...list.map((word) => element("span", { class: "tag", "data-word": word }, text(word))));
}

// rows fills a table's body. Each row is a list of cells; a cell is a text, an element, or an object of text and class. A
// narrow screen shows the column's title beside each cell.
export function rows(body, list, empty, columns) {
  if (!list.length) {
    body.replaceChildren(element("tr", {}, element("td", { colspan: columns }, empty)));
    return;
  }
  const titles = [...(body.parentNode.tHead?.rows[0].cells ?? [])].map((th) => th.textContent);
  const cell = (c, i) => {
    const td = element("td", { "data-title": titles[i], class: c instanceof Node ? "" : c?.class ?? "" });
    td.append(typeof c === "object" && !(c instanceof Node) ? c.text : c);
    return td;
  };
  body.replaceChildren(...list.map((cells) => element("tr", {}, ...cells.map(cell))));
}

// stamp shows a time in the reader's zone. ms counts from 1970.
export const stamp = (ms) => element("time", { datetime: new Date(ms).toISOString(), title: fullTime(ms) }, time(ms));

// Actions that solve a problem, for users who may write.
const remedies = { confirm: "Confirm …" };

// problems fills the list above every page. Each problem has a text, and perhaps an action.
export function problems(list) {
  const box = document.getElementById("problems"), write = document.body.dataset.write && document.body.dataset.confirm;
  const text = list.map((p) => p.text).join("\n");
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...list.map((p) => element("li", {}, p.text, p.act && write ? " " : null,
    p.act && write ? element("button", { type: "button", class: "button", "data-act": p.act }, remedies[p.act]) : null)));
  box.hidden = list.length === 0;
}
