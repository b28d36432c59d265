/* How a webhook's last attempts went: its badge, its rate of success, its last failure and a row of bars. */

import { el } from "../dom.js";
import { badge } from "../components.js";
import * as format from "../format.js";
import { sparkline } from "../sparkline.js";

const OUTCOMES = {
  timeout: "Timed out", unreachable: "Could not connect", reset: "Connection lost",
  refused: "Address is not public", invalid: "Invalid HTTP response",
};
// Bars of the list's small charts.
const BARS = 30;
// Below this share of delivered attempts an active webhook is not shown as good.
const GOOD_RATE = 0.9;

export const isSuccess = ({ status_code: code }) => code >= 200 && code < 300;
export const outcomeOf = (attempt) => OUTCOMES[attempt.outcome] ?? format.label(attempt.outcome);
export const resultOf = (attempt) => (attempt.status_code
  ? `${attempt.status_code} in ${format.millis(attempt.duration_ms)}`
  : `${outcomeOf(attempt)} after ${format.millis(attempt.duration_ms)}`);

/* The status; of an active webhook also whether its deliveries arrive. */
export function statusBadge({ status, health }) {
  if (status !== "active") return badge(status);
  if (health.failing) return badge("failing", "bad");
  return badge("active", health.success_rate !== null && health.success_rate < GOOD_RATE ? "wait" : "good");
}

export function healthOf({ health: { success_rate: rate, recent } }) {
  if (rate === null) return el("span.hint", null, "No attempts yet");
  const bars = recent.slice(-BARS).map((each) => ({ value: each.duration_ms, tone: each.delivered ? "good" : "bad" }));
  return [el("div.health", null, format.percent(rate), sparkline(bars, `Duration of the last ${format.counted(bars.length, "attempt")}`)),
    el("span.below", null, recent.length > 1 ? `of the last ${recent.length} attempts, with tests` : "of one attempt, with tests")];
}

// The API counts the events of a day up to this many.
const COUNTED = 100;

export const eventsOf = ({ health: { events_last_day: events } }) => (events < COUNTED ? String(events) : `${COUNTED}+`);

export const lastFailureOf = ({ health: { last_failure: last } }) => (last
  ? [resultOf(last), el("span.below", null, format.ago(last.started_at))] : format.NONE);
