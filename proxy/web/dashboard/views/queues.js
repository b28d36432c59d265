/* What runs beside the workers: how far chains are followed, what waits to be delivered; and the workers themselves. */

import { admin } from "../api.js";
import { el, put } from "../dom.js";
import { badge, card, empty, facts, heading, poll, table } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 3;
const FOLLOWING = { following: "good", waiting: "wait", stopped: "bad" };
const WEBHOOKS = ["active", "paused", "disabled"];

export async function showQueues() {
  const [followers, deliveries, workers] = [el("div"), el("div"), el("div")];
  const load = async () => {
    const [followed, waiting, live] = await Promise.all([admin.get("/followers"), admin.get("/deliveries"), admin.get("/live")]);
    put(followers, followersOf(followed.followers));
    put(deliveries, deliveriesOf(waiting));
    put(workers, workersOf(live.workers));
  };
  const node = el("div", null, heading("Queues", { lead: "What runs beside the calls." }),
    card("Followers", followers), card("Deliveries", deliveries), card("Workers", workers));
  await load();
  poll(node, REFRESH_S, load);
  return node;
}

const followersOf = (rows) => (rows.length ? table("Followers", [
  { name: "Network", show: (each) => each.network },
  { name: "State", show: (each) => el("div", null, badge(each.state, FOLLOWING[each.state]), each.fault && el("span.below", null, each.fault)) },
  { name: "Block", kind: "num", show: (each) => format.number(each.block) },
  { name: "Tip", kind: "num", show: (each) => format.number(each.tip) },
  { name: "Behind", kind: "num", show: (each) => (each.lag_blocks === null ? format.NONE : `${format.number(each.lag_blocks)} blocks`) },
  { name: "Moved", show: (each) => format.ago(each.updated_at) },
], rows) : empty("No network is followed"));

function deliveriesOf(said) {
  const attempts = said.attempts_last_hour ?? {};
  return facts([
    ["Due", format.number(said.due)],
    ["Late", format.number(said.late)],
    ["Oldest due", said.oldest_due_at ? format.ago(said.oldest_due_at) : format.NONE],
    ["Over their quota", format.number(said.over_quota)],
    ["Parked", format.number(said.parked)],
    ...Object.entries(attempts).map(([name, value]) => [`Last hour, ${format.plain(name).toLowerCase()}`, format.number(value)]),
    ...WEBHOOKS.map((name) => [`Webhooks, ${name}`, format.number(said.webhooks?.[name] ?? 0)]),
  ]);
}

const workersOf = (rows) => (rows.length ? table("Workers", [
  { name: "Worker", show: (each) => [`${each.host ?? ""} ${each.pid ?? ""}`, el("code.below", null, each.worker ?? each.id ?? "")] },
  { name: "Connections", kind: "num", show: (each) => format.number(each.connections) },
  { name: "Keys", kind: "num", show: (each) => format.number(each.keys) },
  { name: "Seen", show: (each) => format.ago(each.seen_at ?? each.at) },
], rows) : empty("No worker has reported yet"));
