/*
 * The operators' overview: health, traffic, errors by who caused them, the largest customers, followers, queues, versions and the
 * latest changes. All figures are those of the other operator pages.
 */

import { admin, query } from "../api.js";
import { bar, el } from "../dom.js";
import { asyncRegion, badge, card, empty, facts, heading, poll, segmentedControl, table, tile } from "../components.js";
import * as format from "../format.js";
import { linkTo } from "../location.js";
import { latestActions } from "./audit.js";
import { hostsOf, versionsOf } from "./fleet.js";
import { followersTable, queueFacts } from "./queues.js";

const REFRESH_S = 5;
const SPANS = { live: "Last 30 min", "3h": "Last 3 h", "24h": "Last 24 h" };
const SECONDS = { live: 1800, "3h": 10800, "24h": 86400 };
const CUSTOMERS = 5;
const CHANGES = 8;

export async function showForOperators() {
  let span = "3h";
  // The replies of this refresh: several sections show the same.
  let replies = new Map();
  const read = (path) => replies.get(path) ?? replies.set(path, admin.get(path)).get(path);
  const traffic = asyncRegion(async () => trafficOf(await usageOf(span), span));
  const others = {
    Health: async () => healthOf(await Promise.all(["/networks", "/followers", "/deliveries", "/processes"].map(read))),
    Networks: async () => networksTable((await read("/networks")).networks),
    Followers: async () => followersTable(await Promise.all(["/followers", "/processes"].map(read))),
    Deliveries: async () => queueFacts(await read("/deliveries")),
    Hosts: async () => hostsTable((await read("/processes")).processes),
    "Latest changes": async () => latestActions(CHANGES),
  };
  const sections = Object.entries(others).map(([title, load]) => ({ title, ...asyncRegion(load) }));
  const choice = segmentedControl("Period", SPANS, span, (next) => {
    span = next;
    traffic.reload();
  });
  const cards = Object.fromEntries(sections.map(({ title, node }) => [title, card(title, node)]));
  const node = el("div", null, heading("Overview", { lead: "All accounts and hosts at a glance.", actions: choice }),
    cards.Health, traffic.node, cards.Networks, cards.Followers, el("div.grid.loose", null, cards.Deliveries, cards.Hosts), cards["Latest changes"]);
  await Promise.all([traffic, ...sections].map(({ ready }) => ready));
  poll(node, REFRESH_S, async () => {
    replies = new Map();
    await Promise.all([traffic, ...sections].map(({ reload }) => reload()));
  });
  return node;
}

function usageOf(span) {
  const now = Math.ceil(Date.now() / 1000);
  const iso = (seconds) => new Date(seconds * 1000).toISOString();
  return admin.get(`/usage${query({ from: iso(now - SECONDS[span]), to: iso(now), by: "account", top: CUSTOMERS })}`);
}

/* --- health --- */

/* Without bundlers and relays, which cannot serve the calls of a network. */
const ofChain = (upstreams) => upstreams.filter(({ kind }) => kind === "upstream");

/* Each problem with a link to its page. */
function problemsOf([{ networks }, { followers }, queue, { processes }]) {
  const upstreams = networks.flatMap(({ network, upstreams: all }) => all.map((each) => ({ network, ...each })));
  const versions = versionsOf(processes);
  return [
    ...networks.filter(({ upstreams: all }) => all.length > 0 && !ofChain(all).some(({ state }) => state === "up"))
      .map(({ network }) => ["down", "bad", `${network} has no upstream that takes calls`, "operator/upstreams"]),
    ...upstreams.filter(({ state }) => state !== "up" && state !== "on_trial")
      .map((each) => [each.state, each.state === "cordoned" ? "wait" : "bad", `${each.label}: ${format.label(each.state).toLowerCase()}`, `operator/upstreams/${encodeURIComponent(each.id)}`]),
    ...followers.filter(({ state }) => state === "stuck" || state === "stopped")
      .map(({ network, state, fault }) => [state, "bad", `The follower of ${network} is ${state}${fault ? `: ${fault}` : ""}`, "operator/queues"]),
    ...queue.late > 0 ? [["late", "wait", `${format.counted(queue.late, "delivery", "deliveries")} overdue by a minute`, "operator/queues"]] : [],
    ...hostsOf(processes).filter(({ valkey }) => valkey.some(({ state }) => state === "away"))
      .map(({ host }) => ["away", "bad", `${host} does not reach Valkey`, "operator/fleet"]),
    ...versions.length > 1 ? [["mixed", "wait", `Hosts run different versions: ${versions.join(", ")}`, "operator/fleet"]] : [],
  ];
}

function healthOf(found) {
  const problems = problemsOf(found);
  if (!problems.length) return el("p", null, badge("up", "good"), " Every upstream takes calls, followers and queues keep up.");
  return el("ul.problems", null, problems.map(([word, tone, text, path]) => el("li", null, badge(word, tone), " ", el("a", { href: linkTo(path) }, text))));
}

/* --- traffic --- */

function trafficOf({ totals, series }, span) {
  const share = (part) => (totals.requests ? format.share(part, totals.requests) : "");
  const linked = (path, amount) => (amount ? el("a", { href: linkTo(path, { range: span }) }, format.compact(amount)) : "0");
  const own = totals.failures - totals.upstream_failures;
  return [el("div.tiles", null,
    tile("Requests", linked("operator/usage", totals.requests), `${format.compact(totals.requests / SECONDS[span])} per second`),
    tile("Callers' errors", linked("operator/errors", totals.caller_errors), share(totals.caller_errors)),
    tile("Upstreams' failures", linked("operator/errors", totals.upstream_failures), share(totals.upstream_failures)),
    tile("Our failures", linked("operator/errors", own), share(own)),
    tile("p99 latency", format.millis(totals.p99_ms), `p50 ${format.millis(totals.p50_ms)}`),
    tile("Cache hit rate", format.share(totals.hits, totals.requests), `${format.compact(totals.hits)} replies`)),
  card("Largest customers", customersTable(series, span))];
}

function customersTable(series, span) {
  const customers = series.slice(0, CUSTOMERS);
  if (!customers.length) return empty("No requests in this period");
  const most = Math.max(...customers.map(({ totals }) => totals.requests), 1);
  return table("Largest customers", [
    { name: "Account", show: ({ name, label }) => el("a", { href: linkTo("operator/usage", { range: span, account: name }) }, label || name) },
    { name: "Requests", kind: "num", show: ({ totals }) => el("div", null, format.number(totals.requests), bar(totals.requests / most)) },
    { name: "Callers' errors", kind: "num", show: ({ totals }) => format.share(totals.caller_errors, totals.requests) },
    { name: "Failures", kind: "num", show: ({ totals }) => format.share(totals.failures, totals.requests) },
    { name: "Units", kind: "num", show: ({ totals }) => format.compact(totals.units) },
    { name: "p99", kind: "num", show: ({ totals }) => format.millis(totals.p99_ms) },
  ], customers);
}

/* --- networks and hosts --- */

const networksTable = (networks) => (networks.length ? table("Networks", [
  { name: "Network", show: ({ network }) => el("a", { href: linkTo("operator/upstreams") }, network) },
  { name: "Block", kind: "num", show: ({ tip }) => format.number(tip || null) },
  { name: "Upstreams up", kind: "num", show: ({ upstreams }) => `${upstreams.filter(({ state }) => state === "up").length} of ${upstreams.length}` },
  { name: "Worst upstream's error rate", kind: "num", show: ({ upstreams }) => format.percent(Math.max(0, ...upstreams.map((each) => each.error_rate ?? 0))) },
  { name: "Slowest upstream's p99", kind: "num", show: ({ upstreams }) => format.millis(Math.max(...upstreams.map((each) => each.p99_ms ?? 0)) || null) },
], networks.map((each) => ({ ...each, upstreams: ofChain(each.upstreams) }))) : empty("No upstreams configured"));

const hostsTable = (processes) => (processes.length ? facts(hostsOf(processes).map(({ host, own }) =>
  [host, `${versionsOf(own).join(", ")}, ${format.counted(own.length, "process", "processes")}`])) : empty("No processes have reported yet"));
