// Numbers, durations, names and times for people. console/figure formats the same on the server; both must agree with its
// table testdata/figures.json.
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 12 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dated = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

// number returns three significant digits, or all digits of the whole part: 0, 0.05, 4.9, 1,234.
export function number(v) {
  const size = Math.abs(v);
  if (!Number.isFinite(v)) return "–";
  if (size < 1e-9) return "0";
  if (size >= 1e15) {
    const [digits, power] = v.toExponential(2).split("e+");
    return `${Number(digits)} × 10^${power}`;
  }
  return grouped.format(size >= 100 ? Math.sign(v) * Math.round(size) : Number(v.toPrecision(3)));
}

export const count = number;

// span returns a duration roughly, in its largest unit.
export function span(ms) {
  const within = (unit, name) => `${number(Math.round(ms / unit))} ${name}`;
  if (!(ms > 0)) return "0 s";
  if (ms < 999.5) return `${number(ms)} ms`;
  if (ms < 10_000) return `${number(Math.round(ms / 100) / 10)} s`;
  if (ms < 120_000) return within(1000, "s");
  if (ms < 7_200_000) return within(60_000, "min");
  if (ms < 172_800_000) return within(3_600_000, "h");
  return within(86_400_000, "d");
}

// exact returns a duration without rounding, in its largest unit.
export function exact(ms) {
  for (const [unit, name] of [[86_400_000, "d"], [3_600_000, "h"], [60_000, "min"]]) {
    if (ms >= unit && ms % unit === 0) return `${number(ms / unit)} ${name}`;
  }
  return ms >= 1000 ? `${ms / 1000} s` : `${ms} ms`;
}

// share returns a share from 0 to 1 in percent; a negative one is not known.
export function share(f) {
  if (!(f >= 0)) return "–";
  const percent = Math.round(f * 100);
  if (f > 0 && percent === 0) return "less than 1 %";
  if (f < 1 && percent === 100) return "more than 99 %";
  return `${percent} %`;
}

const escapes = { "\x07": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v" };

// shown returns a name without characters that end the line or change the direction of the text, and with its blanks where a
// page would not show them.
export const shown = (name) => name.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]|(?! )\p{Zs}|^ |(?<= ) | $/gu, (c) => {
  const code = c.codePointAt(0), hex = (n) => code.toString(16).padStart(n, "0");
  return escapes[c] ?? (code < 0x80 ? `\\x${hex(2)}` : code < 0x10000 ? `\\u${hex(4)}` : `\\U${hex(8)}`);
});

// time returns a time in the reader's zone and language. ms counts from 1970.
export function time(ms) {
  const then = new Date(ms);
  return (then.toDateString() === new Date().toDateString() ? clock : dated).format(then);
}

const brief = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

// briefTime returns a time that fits into a tag.
export function briefTime(ms) {
  const then = new Date(ms);
  return (then.toDateString() === new Date().toDateString() ? clock : brief).format(then);
}

export const ago = (ms) => (ms < 1000 ? "just now" : `${span(ms)} ago`);

const minute = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const date = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric" });

// tick returns a label for an axis whose ticks are step seconds apart.
export function tick(seconds, step) {
  const then = new Date(seconds * 1000);
  if (step >= 86_400 || then.getHours() + then.getMinutes() + then.getSeconds() === 0) return date.format(then);
  return (step < 60 ? clock : minute).format(then);
}

export const fullTime = (ms) => full.format(new Date(ms));

// showTimes converts the times in the page to the reader's zone.
export function showTimes(root) {
  for (const t of root.querySelectorAll("time[datetime]:not([title])")) {
    const ms = Date.parse(t.dateTime);
    t.title = fullTime(ms);
    if (t.hasAttribute("data-clock")) t.textContent = time(ms);
  }
}
