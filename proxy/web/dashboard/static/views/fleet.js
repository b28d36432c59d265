/* The processes of all hosts, for operators: versions, roles, connections to Valkey, and who follows which network. */

import { admin } from "../api.js";
import { el, setChildren } from "../dom.js";
import { badge, card, empty, heading, poll, table } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 3;

export async function showForOperators() {
  const [lead, hosts, followers, processes] = [el("span"), el("div"), el("div"), el("div")];
  const load = async () => {
    const found = (await admin.get("/processes")).processes;
    const byHost = hostsOf(found);
    setChildren(lead, `${format.number(byHost.length)} ${byHost.length === 1 ? "host" : "hosts"}, ${format.number(found.length)} processes.`);
    setChildren(hosts, hostsTable(byHost));
    setChildren(followers, followersTable(found));
    setChildren(processes, processesTable(found));
  };
  const node = el("div", null, heading("Fleet", { lead }),
    card("Hosts", hosts), card("Followed networks", followers), card("Processes", processes));
  await load();
  poll(node, REFRESH_S, load);
  return node;
}

const unique = (values) => [...new Set(values)];

/* One host per instance: a machine may run several. */
const hostsOf = (found) => unique(found.map((each) => each.instance)).map((instance) => {
  const own = found.filter((each) => each.instance === instance);
  return { instance, host: own[0].host, own, valkey: own.map((each) => each.valkey).filter(Boolean) };
});

const rolesOf = (own) => unique(own.map((each) => each.role))
  .map((role) => [role, own.filter((each) => each.role === role).length])
  .map(([role, count]) => (count === 1 ? role : `${count} × ${role}`)).join(", ");

const sum = (values) => values.reduce((total, each) => total + each, 0);

const hostsTable = (rows) => (rows.length ? table("Hosts", [
  { name: "Host", show: (each) => [each.host, el("code.below", null, each.instance)] },
  { name: "Version", show: (each) => unique(each.own.map((process) => process.version)).join(", ") },
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

function followersTable(found) {
  const rows = found.flatMap((process) => process.follows.map((each) => ({ ...each, process })));
  return rows.length ? table("Followed networks", [
    { name: "Network", show: (each) => each.network },
    { name: "Followed by", show: ({ process }) => `${process.host} ${process.pid}` },
    { name: "Block", kind: "num", show: (each) => format.number(each.block) },
    { name: "Head", kind: "num", show: (each) => format.number(each.head) },
    { name: "Lag", kind: "num", show: (each) => `${format.number(each.lag_blocks)} blocks` },
  ], rows) : empty("No followed networks");
}

const processesTable = (rows) => (rows.length ? table("Processes", [
  { name: "Process", show: (each) => `${each.host} ${each.pid}` },
  { name: "Role", show: (each) => format.label(each.role) },
  { name: "Version", show: (each) => each.version },
  { name: "Started", show: (each) => format.ago(each.started_at) },
], rows) : empty("No processes have reported yet"));
