/* Figures and times as people read them, in their own language and time zone. */

const whole = new Intl.NumberFormat();
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });
const SPANS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

export const NONE = "–";

export const number = (value) => (value === null || value === undefined ? NONE : whole.format(value));
export const compact = (value) => (value === null || value === undefined ? NONE : value < 10000 ? whole.format(Math.round(value * 100) / 100) : short.format(value));
export const share = (part, all) => (all ? percent(part / all) : NONE);

export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const points = value * 100;
  return `${points === 0 || points >= 10 ? Math.round(points * 10) / 10 : Math.round(points * 100) / 100}%`;
}

export function millis(value) {
  if (value === null || value === undefined) return NONE;
  const digits = (number, most) => String(Number(number.toFixed(most)));
  if (value >= 1000) return `${digits(value / 1000, value >= 10000 ? 0 : 1)} s`;
  return `${digits(value, value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
}

export const usd = (text) => (text === null || text === undefined ? NONE : `$${text}`);
export const date = (iso) => (iso ? day.format(new Date(iso)) : NONE);
export const time = (iso) => (iso ? moment.format(new Date(iso)) : NONE);
export const hour = (iso) => (iso ? clock.format(new Date(iso)) : NONE);

/* "3 minutes ago", "in 2 hours". */
export function ago(iso, now = Date.now()) {
  if (!iso) return "never";
  const seconds = (new Date(iso).getTime() - now) / 1000;
  const [unit, size] = SPANS.find(([, size]) => Math.abs(seconds) >= size) ?? ["second", 1];
  return relative.format(Math.trunc(seconds / size), unit);
}

/* A word of the API as a word of the page: address_activity -> Address activity. */
export function plain(word) {
  const text = String(word).replaceAll("_", " ").toLowerCase();
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/* Lines or commas -> a list without empty items. */
export const listed = (text) => text.split(/[\n,]/).map((item) => item.trim()).filter(Boolean);
