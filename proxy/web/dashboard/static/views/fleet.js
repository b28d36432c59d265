/* The processes of all hosts, for operators: versions, roles, connections, and their view of Valkey. */

import { admin } from "../api.js";
import { el, setChildren } from "../dom.js";
import { badge, card, empty, heading, idText, poll, table } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 3;

export async function showForOperators() {
  const [lead, hosts, processes] = [el("span"), el("div"), el("div")];
  const load = async () => {
    const [{ processes: found }, { workers }] = await Promise.all([admin.get("/processes"), admin.get("/live")]);
    const byHost = hostsOf(found);
    setChildren(lead, `${format.number(byHost.length)} ${byHost.length === 1 ? "host" : "hosts"}, ${format.number(found.length)} processes. Their background work is on the page `,
      el("a", { href: "#/operator/queues" }, "Queues"), ".");
    setChildren(hosts, hostsTable(byHost));
    setChildren(processes, processesTable(found, workers));
  };
  const node = el("div", null, heading("Fleet", { lead }), card("Hosts", hosts), card("Processes", processes));
  await load();
  poll(node, REFRESH_S, load);
  return node;
}

const unique = (values) => [...new Set(values)];

/* One host per instance: a machine may run several. */
export const hostsOf = (found) => unique(found.map((each) => each.instance)).map((instance) => {
  const own = found.filter((each) => each.instance === instance);
  return { instance, host: own[0].host, own, valkey: own.map((each) => each.valkey).filter(Boolean) };
});

export const versionsOf = (processes) => unique(processes.map(({ version }) => version)).sort();

const rolesOf = (own) => unique(own.map((each) => each.role))
  .map((role) => [role, own.filter((each) => each.role === role).length])
  .map(([role, count]) => (count === 1 ? role : `${count} × ${role}`)).join(", ");

const sum = (values) => values.reduce((total, each) => total + each, 0);

const hostsTable = (rows) => (rows.length ? table("Hosts", [
  { name: "Host", show: (each) => [each.host, el("span.below", null, idText(each.instance))] },
  { name: "Version", show: (each) => versionsOf(each.own).join(", ") },
  { name: "Processes", show: (each) => rolesOf(each.own) },
  { name: "Valkey", show: ({ valkey }) => (valkey.length ? valkeyState(valkey) : format.NONE) },
  { name: "Round trip", kind: "num", show: ({ valkey }) => (valkey.length ? format.millis(Math.max(...valkey.map((each) => each.round_trip_ms))) : format.NONE) },
  { name: "Hosts known", kind: "num", show: ({ valkey }) => (valkey.length ? format.number(Math.max(...valkey.map((each) => each.hosts))) : format.NONE) },
  { name: "Leases", kind: "num", show: ({ valkey }) => (valkey.length ? format.number(sum(valkey.map((each) => each.leases))) : format.NONE) },
], rows) : empty("No processes have reported yet"));

/* The worst state of its workers. */
function valkeyState(valkey) {
  const isAway = valkey.some((each) => each.state === "away");
  return badge(isAway ? "away" : "up", isAway ? "bad" : "good");
}

/* ethereum/mainnet: back-fill 45 %, 3,000 transfers/s, 20 min left */
function backfillText(each) {
  const share = each.total ? Math.floor((100 * each.done) / each.total) : 0;
  const end = each.paused ?? (each.left_s === null ? "" : `${Math.ceil(each.left_s / 60)} min left`);
  return `${each.network}: back-fill ${share} %, ${format.number(Math.round(each.transfers_s))} transfers/s${end ? `, ${end}` : ""}`;
}

/* `workers`: the reports of those that serve requests. */
function processesTable(rows, workers) {
  if (!rows.length) return empty("No processes have reported yet");
  const report = ({ host, pid }) => workers.find((each) => each.host === host && each.pid === pid) ?? {};
  return table("Processes", [
    { name: "Process", show: (each) => `${each.host} ${each.pid}` },
    { name: "Role", show: (each) => format.label(each.role) },
    { name: "Version", show: (each) => each.version },
    { name: "Started", show: (each) => format.ago(each.started_at) },
    { name: "Follows", show: (each) => [...each.follows.map(({ network }) => network), ...each.backfills.map(backfillText)].join(", ") || format.NONE },
    { name: "Connections", kind: "num", show: (each) => format.number(report(each).connections) },
    { name: "Keys", kind: "num", show: (each) => format.number(report(each).keys) },
  ], rows);
}
