/* Formats numbers in the browser's language, and times in its time zone. Dates have one form everywhere: 16 Nov 2026, 14:05:09. */

const DATES = "en-GB";
// A formatter takes about a millisecond to make: only those that a page uses are made.
const once = (make) => {
  let made = null;
  return () => (made ??= make());
};
const integer = once(() => new Intl.NumberFormat());
const shortened = once(() => new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 }));
const cents = once(() => new Intl.NumberFormat(undefined, { minimumFractionDigits: 2, maximumFractionDigits: 2 }));
const small = once(() => new Intl.NumberFormat(undefined, { maximumSignificantDigits: 2 }));
const day = once(() => new Intl.DateTimeFormat(DATES, { dateStyle: "medium" }));
const dateTime = once(() => new Intl.DateTimeFormat(DATES, { dateStyle: "medium", timeStyle: "medium" }));
const short = once(() => new Intl.DateTimeFormat(DATES, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" }));
const clock = once(() => new Intl.DateTimeFormat(DATES, { timeStyle: "medium" }));
const minute = once(() => new Intl.DateTimeFormat(DATES, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }));
const relative = once(() => new Intl.RelativeTimeFormat(undefined, { numeric: "auto" }));
const SPANS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

export const NONE = "–";

export const number = (value) => (value === null || value === undefined ? NONE : integer().format(value));
export const compact = (value) => (value === null || value === undefined ? NONE : value < 10000 ? integer().format(Math.round(value * 100) / 100) : shortened().format(value));
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
  if (value >= 1000) return `${digits(value / 1000, value >= 10000 ? 1 : 2)} s`;
  return `${digits(value, value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
}

/* Cents, or two significant digits of an amount below a dollar. */
export function usd(amount) {
  if (amount === null || amount === undefined) return NONE;
  const value = Number(amount);
  return `$${(Math.abs(value) >= 1 || value === 0 ? cents : small)().format(value)}`;
}

export const date = (iso) => (iso ? day().format(new Date(iso)) : NONE);
export const time = (iso) => (iso ? dateTime().format(new Date(iso)) : NONE);
export const shortTime = (iso) => (iso ? short().format(new Date(iso)) : NONE);
export const clockTime = (iso) => (iso ? clock().format(new Date(iso)) : NONE);
export const span = (from, to) => minute().formatRange(new Date(from), new Date(to));

/* A relative time: "3 minutes ago", "in 2 hours". */
export function ago(iso, now = Date.now()) {
  if (!iso) return "Never";
  const seconds = (new Date(iso).getTime() - now) / 1000;
  const [unit, size] = SPANS.find(([, size]) => Math.abs(seconds) >= size) ?? ["second", 1];
  return relative().format(Math.trunc(seconds / size), unit);
}

/* A text that begins with a capital letter. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/* An API value as a label: address_activity -> Address activity. */
export function label(value) {
  const text = String(value).replaceAll("_", " ").toLowerCase().replace(/\b(usd|url|id)\b/g, (word) => word.toUpperCase());
  return sentence(text);
}

const LIMITS = { keys: "API keys", sample_every: "Successful requests recorded: one in", policies: "Gas policies", sockets: "WebSockets", subscriptions: "Subscriptions per WebSocket" };

/* A limit of a plan as a label. */
export const limitName = (name) => LIMITS[name] ?? label(name);

/* "1 call", "2 calls". */
export const counted = (amount, noun, nouns = `${noun}s`) => `${compact(amount)} ${amount === 1 ? noun : nouns}`;

/* The beginning of a long text. */
export const beginning = (text, most = 90) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/* Splits text at line breaks and commas, and drops empty items. */
export const splitList = (text) => text.split(/[\n,]/).map((item) => item.trim()).filter(Boolean);
