// The state of a page is in its address, so that the address can be shared.
export const param = (name) => new URLSearchParams(location.search).get(name);

// setParam changes the address without loading the page; an empty value removes the parameter.
export function setParam(name, value) {
  const all = new URLSearchParams(location.search);
  if (value) all.set(name, value);
  else all.delete(name);
  const query = all.toString();
  history.replaceState(null, "", location.pathname + (query ? `?${query}` : ""));
}
