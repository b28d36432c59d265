/* One upstream over time, for operators: latency, errors, lag and circuit breaker. */

import { admin, query } from "../api.js";
import { Chart } from "../chart.js";
import { el, setChildren } from "../dom.js";
import { empty, heading, note, poll } from "../components.js";
import * as format from "../format.js";
import { place, setParams } from "../location.js";
import { rangeBetween, rangeControl, rangeIn, rangeParams, spanOf } from "../ranges.js";
import { labelTags, placeOf } from "./upstreams.js";

const REFRESH_S = 15;
const LEAD = "As seen by all workers. Samples are kept for three days.";

export async function showUpstream(id) {
  let range = rangeIn(place().params);
  const title = el("span", null, id);
  const problem = el("div");
  const about = el("span");
  const choose = (next) => {
    range = next;
    control.show(next);
    setParams(rangeParams(next));
    load().catch((failure) => problem.replaceChildren(note(failure.message)));
  };
  const control = rangeControl(range, choose);
  const chart = (name, formatted, isWhole) => new Chart(name, { format: formatted, isWhole, syncKey: "upstream", onSelect: (from, to) => choose(rangeBetween(from, to)) });
  const [latency, errors, lag, breaker] = [chart("Latency", format.millis), chart("Error rate", format.percent), chart("Lag", format.compact, true),
    chart("Circuit breaker", format.percent)];
  const nothing = empty("No samples in this period", "The first ones appear within a minute of the start.");
  const grid = el("div.grid", null, [latency, errors, lag, breaker].map(({ node }) => node));
  const load = async () => {
    const { from, to } = spanOf(range);
    const [found, { networks }] = await Promise.all([admin.get(`/upstreams/${encodeURIComponent(id)}/history${query({ from, to })}`), admin.get("/networks")]);
    const now = networks.flatMap(({ upstreams }) => upstreams).find((each) => each.id === id);
    setChildren(about, now && [`${placeOf(now)} · tier ${now.tier} · operator ${now.operator} `, labelTags(now)]);
    const line = (label, colour, values, shown, soft) => ({ label, colour, values, soft, total: shown(values.at(-1)) });
    title.textContent = found.label || id; // it begins with the network
    problem.replaceChildren();
    const drawing = { step: found.step_s, span: [from, to].map((time) => Date.parse(time) / 1000) };
    nothing.hidden = found.times.length > 0;
    grid.hidden = !found.times.length;
    latency.draw(found.times, [line("p50", "series-0", found.p50_ms, format.millis), line("p99", "series-1", found.p99_ms, format.millis, true)], drawing);
    errors.draw(found.times, [line("failed", "series-4", found.error_rate, format.percent)], { ...drawing, unit: "of calls" });
    lag.draw(found.times, [line("behind", "series-3", found.lag_blocks, format.compact)], { ...drawing, unit: "blocks" });
    breaker.draw(found.times, [line("not closed", "series-5", found.breaker_open, format.percent)], { ...drawing, unit: "of the time" });
  };
  const node = el("div", null, el("a.crumb", { href: "#/operator/upstreams" }, "← Upstreams"),
    heading(title, { lead: [about, el("br"), LEAD], actions: control.node }), problem, grid, nothing);
  await load();
  poll(node, REFRESH_S, load);
  return node;
}
