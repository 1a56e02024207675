// Numbers and times as people read them. Numbers keep their width as far as they can, so that they do not jump.
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const small = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat(undefined, { weekday: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

// number: 0, 0.05, 4.9, 1,234.
export function number(v) {
  if (v === 0) return "0";
  if (Math.abs(v) < 0.1) return small.format(v);
  return (Math.abs(v) < 100 ? tenth : whole).format(v);
}

export const count = (n) => whole.format(n);

export function span(ms) {
  if (ms < 1) return `${number(ms)} ms`;
  if (ms < 1000) return `${whole.format(ms)} ms`;
  if (ms < 120_000) return `${tenth.format(ms / 1000)} s`;
  if (ms < 7_200_000) return `${whole.format(ms / 60_000)} min`;
  return `${whole.format(ms / 3_600_000)} h`;
}

export const percent = (share) => (share < 0 ? "–" : `${Math.round(share * 100)} %`);

// time is in the reader's zone and language. ms since 1970.
export function time(ms) {
  const then = new Date(ms);
  return (then.toDateString() === new Date().toDateString() ? clock : day).format(then);
}

export const ago = (ms) => (ms < 1000 ? "just now" : `${span(ms)} ago`);

const minute = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const date = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric" });

// tick is a time on an axis whose ticks are step seconds apart.
export function tick(seconds, step) {
  const then = new Date(seconds * 1000);
  if (step >= 86_400 || then.getHours() + then.getMinutes() + then.getSeconds() === 0) return date.format(then);
  return (step < 60 ? clock : minute).format(then);
}

export const fullTime = (ms) => full.format(new Date(ms));

// showTimes gives times that the page came with the reader's zone.
export function showTimes(root) {
  for (const t of root.querySelectorAll("time[data-at]")) {
    if (t.textContent) continue;
    const ms = Number(t.dataset.at) * 1000;
    t.dateTime = new Date(ms).toISOString();
    t.textContent = time(ms);
    t.title = fullTime(ms);
  }
  for (const t of root.querySelectorAll("time[datetime]:not([title])")) t.title = fullTime(Date.parse(t.dateTime));
}
