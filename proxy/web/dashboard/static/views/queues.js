/* Background work, for operators: followed networks, the webhook delivery queue, and the workers. */

import { admin } from "../api.js";
import { el } from "../dom.js";
import { asyncRegion, badge, card, empty, facts, heading, poll, table } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 3;
const FOLLOWING = { following: "good", waiting: "wait", stopped: "bad", stuck: "bad" };
const WEBHOOKS = ["active", "paused", "disabled"];

export async function showForOperators() {
  const sections = Object.entries({
    Followers: async () => followersTable((await admin.get("/followers")).followers),
    Deliveries: async () => deliveryFacts(await admin.get("/deliveries")),
    Workers: async () => workersTable((await admin.get("/live")).workers),
  }).map(([title, load]) => ({ title, ...asyncRegion(load) }));
  const node = el("div", null, heading("Queues", { lead: "Chain followers, webhook deliveries and workers." }),
    sections.map((each) => card(each.title, each.node)));
  await Promise.all(sections.map(({ ready }) => ready));
  poll(node, REFRESH_S, () => Promise.all(sections.map(({ reload }) => reload())).then(() => REFRESH_S));
  return node;
}

const followersTable = (rows) => (rows.length ? table("Followers", [
  { name: "Network", show: (each) => each.network },
  { name: "State", show: (each) => el("div", null, badge(each.state, FOLLOWING[each.state]), each.fault && el("span.below", null, each.fault)) },
  { name: "Block", kind: "num", show: (each) => format.number(each.block) },
  { name: "Head", kind: "num", show: (each) => format.number(each.tip) },
  { name: "Lag", kind: "num", show: (each) => (each.lag_blocks === null ? format.NONE : `${format.number(each.lag_blocks)} blocks`) },
  { name: "Updated", show: (each) => format.ago(each.updated_at) },
], rows) : empty("No followed networks"));

function deliveryFacts(queue) {
  return facts([
    ["Due", format.number(queue.due)],
    ["Overdue by a minute", format.number(queue.late)],
    ["Oldest due", queue.oldest_due_at ? format.ago(queue.oldest_due_at) : format.NONE],
    ["Over quota", format.number(queue.over_quota)],
    ["Parked", format.number(queue.parked)],
    ...WEBHOOKS.map((name) => [`${format.label(name)} webhooks`, format.number(queue.webhooks?.[name] ?? 0)]),
  ]);
}

const workersTable = (rows) => (rows.length ? table("Workers", [
  { name: "Worker", show: (each) => [`${each.host ?? ""} ${each.pid ?? ""}`, el("code.below", null, each.worker ?? each.id ?? "")] },
  { name: "Connections", kind: "num", show: (each) => format.number(each.connections) },
  { name: "Keys", kind: "num", show: (each) => format.number(each.keys) },
  { name: "Last report", show: (each) => format.ago(each.seen_at ?? each.at) },
], rows) : empty("No workers have reported yet"));
