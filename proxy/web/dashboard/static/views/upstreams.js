/* The health of every upstream, aggregated over all workers, with cordon and uncordon. */

import { admin } from "../api.js";
import { bar, el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, asyncRegion, badge, button, card, dialog, empty, heading, note, poll, table, toast } from "../components.js";
import * as format from "../format.js";
import { linkTo } from "../location.js";

const REFRESH_S = 2;

export const showForOperators = async ([id]) => (id ? (await import("./upstream.js")).showUpstream(id) : showList());

async function showList() {
  const lead = el("span");
  const health = asyncRegion(async () => {
    const { workers, networks } = await admin.get("/networks");
    setChildren(lead, `Live health reported by ${format.number(workers)} ${workers === 1 ? "worker" : "workers"}.`);
    return networks.length ? networks.map((network) => networkCard(network, health.reload))
      : empty("No upstreams configured", "Add [[upstreams]] entries with network and url to the settings.");
  });
  const changes = asyncRegion(async () => changesTable((await admin.get("/upstream-changes")).changes));
  const trials = asyncRegion(async () => (await admin.get("/trials")).trials.map((each) => trialCard(each, trials.reload)));
  const contradictions = asyncRegion(async () => contradictionsTable((await admin.get("/contradictions")).contradictions));
  const node = el("div", null, heading("Upstreams", { lead }), health.node, trials.node, card("Contradicted replies", contradictions.node), card("State changes", changes.node));
  await Promise.all([health.ready, trials.ready, changes.ready, contradictions.ready]);
  poll(node, REFRESH_S, () => Promise.all([health.reload(), trials.reload(), changes.reload(), contradictions.reload()]).then(() => REFRESH_S));
  return node;
}

/* One network: its upstreams, then its bundlers and its private relays. */
function networkCard({ network, tip, upstreams }, load) {
  return el("section.card", { "data-network": network }, el("div.spread", null, el("h2", null, network),
    el("span.hint", null, tip ? `Block ${format.number(tip)}` : "No block yet")),
  table(`Upstreams of ${network}`, [
    { name: "Upstream", show: (each) => [el("a", { href: `#/operator/upstreams/${encodeURIComponent(each.id)}` }, each.label), el("span.below", null, placeOf(each))] },
    { name: "Operator", show: (each) => [each.operator ?? format.NONE, labelTags(each)] },
    { name: "Tier", kind: "num", show: (each) => String(each.tier) },
    { name: "State", show: stateOf },
    { name: "Circuit breaker", show: (each) => badge(each.breaker, each.breaker === "closed" ? "good" : each.breaker === "open" ? "bad" : "wait") },
    { name: "Lag", kind: "num", show: (each) => (each.lag_blocks === null ? format.NONE : `${format.number(each.lag_blocks)} blocks`) },
    { name: "Error rate", kind: "num", show: (each) => el("div", null, format.percent(each.error_rate), each.error_rate > 0 && bar(each.error_rate, "bad")) },
    { name: "p50", kind: "num", show: (each) => format.millis(each.p50_ms) },
    { name: "p99", kind: "num", show: (each) => format.millis(each.p99_ms) },
    { name: "Replies", kind: "num", show: (each) => el("div", null, format.number(each.answered), each.in_flight > 0 && el("span.below", null, `${each.in_flight} in flight`)) },
    { name: "Actions", kind: "row-actions", show: (each) => actionOf(each, { network, isLast: isLastOf(each, upstreams), load }) },
  ], upstreams.map((each) => ({ data: each, attributes: { "data-id": each.id } }))));
}

/* The host of an upstream, and whether it is a bundler or a relay. */
export const placeOf = ({ host, kind }) => [kind !== "upstream" && format.label(kind), host ?? "Unix socket"].filter(Boolean).join(" · ");
export const labelTags = ({ labels }) => labels.length > 0 && el("span.tags", null, labels.map((label) => el("code", null, label)));

/* Whether no other upstream of its kind would take calls. */
const isLastOf = (each, upstreams) => !upstreams.some((other) => other.id !== each.id && other.kind === each.kind && !other.cordoned);

const stateOf = (each) => el("div", null, badge(each.state), each.cordon && el("span.below", null,
  [each.cordon.reason, `by ${each.cordon.by} ${format.ago(each.cordon.at)}`].filter(Boolean).join(", ")),
each.exclusions?.map((text) => el("span.below", null, format.sentence(text))),
each.contradicted > 0 && el("span.below", { title: each.contradiction ?? "" }, `${format.number(each.contradicted)} wrong replies`));

function actionOf(each, { network, isLast, load }) {
  if (!each.cordoned) return button("Cordon", () => cordon(each, { network, isLast, load }), { kind: "small", "aria-label": `Cordon ${each.label}` });
  return asyncButton("Uncordon", async () => {
    await admin.post(`/upstreams/${encodeURIComponent(each.id)}/uncordon`);
    toast(`${each.label} uncordoned`);
    await load();
  }, { kind: "small", "aria-label": `Uncordon ${each.label}` });
}

function cordon(each, { network, isLast, load }) {
  dialog(`Cordon ${each.label}`, (close) => {
    const reason = forms.text("Reason", { maxlength: "200", placeholder: "Maintenance at 14:00", hint: "Shown to other operators." });
    return [el("p", null, "All workers stop sending calls to this upstream within a second. Calls in flight finish."),
      isLast && note(`This is the last ${each.kind} of ${network} that is not cordoned. Without it, every call to ${network} that needs one fails until you uncordon one.`),
      forms.form(reason.node, {
        label: isLast ? `Cordon the last ${each.kind}` : "Cordon",
        kind: isLast ? "danger" : "main",
        cancel: close,
        send: async () => {
          await admin.post(`/upstreams/${encodeURIComponent(each.id)}/cordon`, { ...(reason.read() && { reason: reason.read() }), ...(isLast && { last: true }) });
          close();
          toast(`${each.label} cordoned`);
          await load();
        },
      })];
  });
}

/* An upstream that gets a share of the reads too, and how its replies compare. */
const trialCard = ({ id, label, share, verdict, ready, skipped, bounds, rate, methods }, load) => el("section.card", { "data-trial": label },
  el("div.spread", null, el("h2", null, `Trial of ${label}`), el("div.actions", null,
    share > 0 ? badge(`${format.percent(share)} of calls`, "live") : badge(ready ? "ready" : "on_trial", ready ? "good" : "wait"),
    id && (share > 0 ? withdrawButton(id, label, load) : button("Promote", () => promote({ id, label, verdict, ready, load }), { kind: "small", "aria-label": `Promote ${label}` })))),
  el("p", null, `${format.sentence(verdict)}.${skipped ? ` ${format.counted(skipped, "read")} skipped because of a limit.` : ""}`),
  (bounds || rate) && el("p.hint", null, [bounds && `Oldest blocks: ${bounds}.`, rate && `Rate: ${rate}.`].filter(Boolean).join(" ")),
  methods.length > 1 && table(`Trial of ${label}`, [
    { name: "Method", show: ({ method }) => (method === "all" ? "All" : el("code", null, method)) },
    { name: "Reads", kind: "num", show: ({ reads }) => format.number(reads) },
    { name: "Same", kind: "num", show: ({ same, reads }) => format.share(same, reads) },
    { name: "Different", kind: "num", show: ({ different, members }) => el("div", null, different ? badge(format.number(different), "bad") : "0", members && el("span.below", null, members)) },
    { name: "Behind", kind: "num", show: ({ behind }) => format.number(behind) },
    { name: "Failed", kind: "num", show: ({ error, missing }) => format.number(error + missing) },
    { name: "p50, in use", kind: "num", show: (each) => `${format.millis(each.their_p50_ms)}, ${format.millis(each.p50_ms)}` },
    { name: "p99, in use", kind: "num", show: (each) => `${format.millis(each.their_p99_ms)}, ${format.millis(each.p99_ms)}` },
    { name: "Cost, in use", kind: "num", show: (each) => `${format.usd(each.their_usd)}, ${format.usd(each.usd)}` },
  ], methods));

const withdrawButton = (id, label, load) => asyncButton("Withdraw", async () => {
  await admin.post(`/upstreams/${encodeURIComponent(id)}/withdraw`);
  toast(`${label} withdrawn`);
  await load();
}, { kind: "small", "aria-label": `Withdraw ${label}` });

function promote({ id, label, verdict, ready, load }) {
  dialog(`Promote ${label}`, (close) => [
    el("p", null, "It gets 1 % of the calls, then 5, 25 and 100 %, while its replies agree with those of other upstreams and are fast. If one differs, it gets none."),
    !ready && note(`Its trial does not say that this is safe: ${verdict}.`),
    forms.form(null, {
      label: ready ? "Promote" : "Promote anyway",
      kind: ready ? "main" : "danger",
      cancel: close,
      send: async () => {
        await admin.post(`/upstreams/${encodeURIComponent(id)}/promote`, ready ? {} : { anyway: true });
        close();
        toast(`${label} gets 1 % of the calls`);
        await load();
      },
    })]);
}

/* The log of state changes of all upstreams. */
const changesTable = (changes) => (changes.length ? table("State changes", [
  { name: "Time", show: (each) => format.time(each.at) },
  { name: "Upstream", show: (each) => [el("a", { href: linkTo(`operator/upstreams/${encodeURIComponent(each.id)}`) }, each.label), el("span.below", null, each.network)] },
  { name: "Before", show: (each) => badge(each.before) },
  { name: "Now", show: (each) => badge(each.state) },
], changes) : empty("No changes in the last day"));

const CONTRADICTED = {
  outvoted: "A quorum of other operators agreed on another reply.",
  refuted: "The chain's hashes contradict the reply.",
  split: "Operators disagree, and none has enough votes. It does not count against the upstream.",
};

/* Replies that other operators or a proof contradicted, with both replies. */
const contradictionsTable = (found) => (found.length ? table("Contradicted replies", [
  { name: "Time", show: (each) => format.time(each.at) },
  { name: "Upstream", show: (each) => [each.upstream, el("span.below", null, each.operator)] },
  { name: "Call", show: (each) => [each.method, el("span.below", { title: each.params }, format.beginning(each.params, 48))] },
  { name: "Kind", show: (each) => el("div", { title: CONTRADICTED[each.kind] }, badge(each.kind, each.kind === "split" ? "wait" : "bad"), el("span.below", null, each.verified_by)) },
  { name: "Its reply", show: (each) => el("span", { title: each.reason || each.digest }, format.beginning(each.reply, 48)) },
  { name: "Other reply", show: (each) => [el("span", { title: each.other_digest }, format.beginning(each.other_reply, 48)),
    el("span.below", null, each.others.map(({ upstream, operator }) => `${upstream} (${operator})`).join(", "))] },
], found) : empty("No contradicted replies", "Replies with X-Verify that other operators or a proof contradict appear here."));

