/* Background work, for operators: how far the followers of networks are, and the queue of webhook deliveries. */

import { admin } from "../api.js";
import { el } from "../dom.js";
import { asyncRegion, badge, card, empty, facts, heading, poll, table } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 3;
const FOLLOWING = { following: "good", waiting: "wait", stopped: "bad", stuck: "bad" };
const WEBHOOKS = ["active", "paused", "disabled"];

export async function showForOperators() {
  const sections = Object.entries({
    Followers: async () => followersTable(await Promise.all([admin.get("/followers"), admin.get("/processes")])),
    Deliveries: async () => queueFacts(await admin.get("/deliveries")),
  }).map(([title, load]) => ({ title, ...asyncRegion(load) }));
  const lead = ["Work in the background: followers of networks, and webhook deliveries. The processes that do it are on the page ", el("a", { href: "#/operator/fleet" }, "Fleet"), "."];
  const node = el("div", null, heading("Queues", { lead }), sections.map((each) => card(each.title, each.node)));
  await Promise.all(sections.map(({ ready }) => ready));
  poll(node, REFRESH_S, () => Promise.all(sections.map(({ reload }) => reload())).then(() => REFRESH_S));
  return node;
}

/* The process that follows a network, or its index. */
function followedBy(network, processes) {
  const found = processes.find(({ follows }) => follows.some((each) => each.network === network));
  return found ? `${found.host} ${found.pid}` : format.NONE;
}

/* From the replies of /followers and /processes. */
export const followersTable = ([{ followers }, { processes }]) => (followers.length ? table("Followers", [
  { name: "Network", show: (each) => each.network },
  { name: "State", show: (each) => el("div", null, badge(each.state, FOLLOWING[each.state]), each.fault && el("span.below", null, each.fault)) },
  { name: "Followed by", show: (each) => followedBy(each.network, processes) },
  { name: "Block", kind: "num", show: (each) => format.number(each.block) },
  { name: "Head", kind: "num", show: (each) => format.number(each.tip) },
  { name: "Lag", kind: "num", show: (each) => (each.lag_blocks === null ? format.NONE : `${format.number(each.lag_blocks)} blocks`) },
  { name: "Updated", show: (each) => format.ago(each.updated_at) },
], followers) : empty("No followed networks"));

export const queueFacts = (queue) => facts([
  ["Due", format.number(queue.due)],
  ["Overdue by a minute", format.number(queue.late)],
  ["Oldest due", queue.oldest_due_at ? format.ago(queue.oldest_due_at) : format.NONE],
  ["Over quota", format.number(queue.over_quota)],
  ["Parked", format.number(queue.parked)],
  ...WEBHOOKS.map((name) => [`${format.label(name)} webhooks`, format.number(queue.webhooks?.[name] ?? 0)]),
]);
