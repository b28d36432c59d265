/* Formats numbers and times in the browser's language and time zone. */

const integer = new Intl.NumberFormat();
const shortened = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const dateTime = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });
const SPANS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

export const NONE = "–";

export const number = (value) => (value === null || value === undefined ? NONE : integer.format(value));
export const compact = (value) => (value === null || value === undefined ? NONE : value < 10000 ? integer.format(Math.round(value * 100) / 100) : shortened.format(value));
export const share = (part, all) => (all ? percent(part / all) : NONE);

export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const points = value * 100;
  const scale = points === 0 || points >= 10 ? 10 : 100;
  return `${Math.round(points * scale) / scale}%`;
}

export function millis(value) {
  if (value === null || value === undefined) return NONE;
  const digits = (number, most) => String(Number(number.toFixed(most)));
  if (value >= 1000) return `${digits(value / 1000, value >= 10000 ? 0 : 1)} s`;
  return `${digits(value, value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
}

export const usd = (text) => (text === null || text === undefined ? NONE : `$${text}`);
export const date = (iso) => (iso ? day.format(new Date(iso)) : NONE);
export const time = (iso) => (iso ? dateTime.format(new Date(iso)) : NONE);
export const clockTime = (iso) => (iso ? clock.format(new Date(iso)) : NONE);

/* A relative time: "3 minutes ago", "in 2 hours". */
export function ago(iso, now = Date.now()) {
  if (!iso) return "Never";
  const seconds = (new Date(iso).getTime() - now) / 1000;
  const [unit, size] = SPANS.find(([, size]) => Math.abs(seconds) >= size) ?? ["second", 1];
  return relative.format(Math.trunc(seconds / size), unit);
}

/* An API value as a label: address_activity -> Address activity. */
export function label(value) {
  const text = String(value).replaceAll("_", " ").toLowerCase().replace(/\busd\b/, "USD");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/* Splits text at line breaks and commas, and drops empty items. */
export const splitList = (text) => text.split(/[\n,]/).map((item) => item.trim()).filter(Boolean);
