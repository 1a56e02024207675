// Elements without markup: names of limits are others' words, and never become HTML.
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

// setText leaves what is the same alone: no layout, no word from a screen reader.
export function setText(e, text) {
  if (e && e.textContent !== String(text)) e.textContent = text;
}

// tags shows the words of a state.
export function tags(e, state) {
  if (e.dataset.words === state) return;
  e.dataset.words = state;
  e.replaceChildren(...(state ? state.split(", ") : []).map((word) => element("span", { class: "tag", "data-word": word }, word)));
}

// rows fills a table's body: each row is a list of cells, a cell a text or an object of text, class and so on.
export function rows(body, list, empty, columns) {
  if (!list.length) {
    body.replaceChildren(element("tr", {}, element("td", { colspan: columns }, empty)));
    return;
  }
  body.replaceChildren(...list.map((cells) => element("tr", {}, ...cells.map((c) =>
    (c instanceof Node ? element("td", {}, c) : typeof c === "object" ? element("td", { class: c.class }, c.text) : element("td", {}, c))))));
}

// problems are shown above every page.
export function problems(list) {
  const box = document.getElementById("problems");
  const text = list.join("\n");
  if (box.dataset.text === text) return;
  box.dataset.text = text;
  box.replaceChildren(...list.map((p) => element("li", {}, p)));
  box.hidden = list.length === 0;
}
