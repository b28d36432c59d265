/* Calls, errors and latencies by method, for operators: one table per network, with the parts of upstreams shaded by calls and failures. */

import { admin, query } from "../api.js";
import { el } from "../dom.js";
import { asyncRegion, card, empty, heading, methodName, poll, segmentedControl, table } from "../components.js";
import * as format from "../format.js";
import { placeOf } from "./upstreams.js";

const REFRESH_S = 30;
const LEAD = "Calls are counted. Callers' errors, such as reverts, are apart from failures, which are ours or an upstream's. The parts of upstreams are estimated from a sample.";

export async function showForOperators() {
  let span = "hour";
  const list = asyncRegion(async () => {
    const [{ networks }, fleet] = await Promise.all([admin.get(`/methods${query({ span })}`), admin.get("/networks")]);
    const upstreams = new Map(fleet.networks.flatMap((each) => each.upstreams).map((each) => [each.label, each]));
    return networks.length ? networks.map((network) => networkCard(network, upstreams)) : card(null, empty("No calls in this period", "Methods appear here about a second after their first recorded call."));
  });
  const choice = segmentedControl("Period", { hour: "Last hour", day: "Last day" }, span, (next) => {
    span = next;
    list.reload();
  });
  await list.ready;
  const node = el("div", null, heading("Methods", { lead: LEAD, actions: choice }), list.node);
  poll(node, REFRESH_S, list.reload);
  return node;
}

const TOTALS = [
  { name: "Method", show: ({ method }) => methodName(method) },
  { name: "Calls", kind: "num", show: ({ calls }) => format.number(calls) },
  { name: "Callers' errors", kind: "num", show: ({ caller_errors, calls }) => shareOf(caller_errors, calls) },
  { name: "Failures", kind: "num", show: ({ failures, upstream_failures: upstreams, calls }) => el("div", null, shareOf(failures, calls),
    failures > 0 && el("span.below", null, `${format.number(upstreams)} of upstreams`)) },
  { name: "p50, p99", kind: "num", show: ({ p50_ms, p99_ms }) => `${format.millis(p50_ms)}, ${format.millis(p99_ms)}` },
];

const shareOf = (part, whole) => `${format.number(part)} (${format.share(part, whole)})`;

function networkCard({ network, methods }, known) {
  const labels = [...new Set(methods.flatMap(({ upstreams }) => upstreams.map(({ upstream }) => upstream)))].sort();
  const cells = methods.flatMap(({ upstreams }) => upstreams);
  const most = Math.max(1, ...cells.map(({ calls }) => calls));
  const columns = labels.map((label) => ({ name: label, below: known.has(label) && placeOf(known.get(label)), kind: "num.heat", show: ({ upstreams }) => cellOf(upstreams.find(({ upstream }) => upstream === label), most) }));
  return card(network, table(`Methods of ${network}`, [...TOTALS, ...columns], methods));
}

/* Blue by its calls, on a logarithmic scale; red if more than one in a hundred attempts failed. */
function cellOf(cell, most) {
  if (!cell) return el("div.cell", null, format.NONE);
  const share = cell.failures / cell.calls;
  const node = el(`div.cell${share > 0.01 ? ".bad" : ""}`, null, el("b", null, format.counted(cell.calls, "call")),
    el("span.below", null, `${format.counted(cell.failures, "failure")} (${format.percent(share)})`),
    el("span.below", null, `p50 ${format.millis(cell.p50_ms)}, p99 ${format.millis(cell.p99_ms)}`));
  node.style.setProperty("--heat", `${Math.round(4 + 26 * Math.log1p(cell.calls) / Math.log1p(most))}%`);
  return node;
}
