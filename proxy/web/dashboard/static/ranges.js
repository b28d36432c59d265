/* Time ranges: a fixed one up to now, or a custom one from a dialog, a chart or the URL. */

import { el, setChildren } from "./dom.js";
import * as forms from "./forms.js";
import { button, dialog, segmentedControl } from "./components.js";
import * as format from "./format.js";

export const RANGES = { live: "30 min", "3h": "3 h", "24h": "24 h", "7d": "7 d", "30d": "30 d", "90d": "90 d" };
const SECONDS = { live: 1800, "3h": 10800, "24h": 86400, "7d": 604800, "30d": 2592000, "90d": 7776000 };
const CUSTOM = "custom";
// Usage by the minute is kept for three days. A range that began long before is shown by the hour.
const MINUTES_KEPT_S = 60 * 3600;

const isTime = (text) => !Number.isNaN(Date.parse(text ?? ""));
const iso = (seconds) => new Date(seconds * 1000).toISOString();

/* The range that an account of this age has data for. Operators see all accounts. */
export function usualRange(createdAt) {
  if (!createdAt) return "24h";
  const age = (Date.now() - Date.parse(createdAt)) / 1000;
  return age < 3600 ? "live" : age < 12 * 3600 ? "3h" : age < 7 * 86400 ? "24h" : "7d";
}

/* The range in a URL's params. */
export function rangeIn({ range, from, to }, usual = "24h") {
  if (isTime(from) && isTime(to) && Date.parse(from) < Date.parse(to)) return { range: CUSTOM, from, to };
  return { range: Object.hasOwn(RANGES, range) ? range : usual };
}

export const rangeParams = ({ range, from, to }) => (range === CUSTOM ? { from, to } : { range });

/* The range between two times in Unix seconds. */
export const rangeBetween = (from, to) => ({ range: CUSTOM, from: iso(from), to: iso(to) });

export function spanOf({ range, from, to }) {
  if (range === CUSTOM) return { from, to };
  const now = Math.ceil(Date.now() / 1000); // with what happened in this second
  return { from: iso(now - SECONDS[range]), to: iso(now) };
}

/* The `step` parameter of a usage query. */
export function stepOf(chosen) {
  const { from, to } = spanOf(chosen);
  const seconds = (Date.parse(to) - Date.parse(from)) / 1000;
  const isOld = Date.now() / 1000 - Date.parse(from) / 1000 > MINUTES_KEPT_S;
  return isOld && seconds <= SECONDS["3h"] ? "hour" : "auto";
}

export const rangeName = ({ range, from, to }) => (range === CUSTOM ? format.span(from, to) : `last ${RANGES[range]}`);

/* {node, show}: buttons for the fixed ranges and a dialog for others. `pick` gets the range. */
export function rangeControl(chosen, pick) {
  const node = el("div.filter");
  const show = (next) => {
    const isCustom = next.range === CUSTOM;
    setChildren(node, segmentedControl("Time range", RANGES, next.range, (range) => {
      show({ range });
      pick({ range });
    }), button(isCustom ? rangeName(next) : "Custom…", () => askRange(next, (range) => {
      show(range);
      pick(range);
    }), { kind: "small", "aria-pressed": String(isCustom), "aria-label": isCustom ? `Custom range: ${rangeName(next)}` : "Custom range" }));
  };
  show(chosen);
  return { node, show };
}

/* datetime-local fields hold local times without a zone. */
export const localTime = (text) => {
  const at = new Date(text);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
};

function askRange(chosen, pick) {
  const span = spanOf(chosen);
  dialog("Custom range", (close) => {
    const from = forms.text("From", { type: "datetime-local", required: true, value: localTime(span.from) });
    const to = forms.text("To", { type: "datetime-local", required: true, value: localTime(span.to) });
    return forms.form(forms.row(from.node, to.node), {
      label: "Show",
      cancel: close,
      send: async () => {
        const range = { range: CUSTOM, from: new Date(from.read()).toISOString(), to: new Date(to.read()).toISOString() };
        if (range.from >= range.to) throw new Error("“To” must be after “From”.");
        close();
        pick(range);
      },
    });
  });
}
