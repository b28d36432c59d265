/* The health of every upstream, as all workers see it together, with cordon and uncordon. */

import { admin } from "../api.js";
import { bar, el, put, renew } from "../dom.js";
import * as forms from "../forms.js";
import { badge, button, card, dialog, empty, heading, poll, table, toast, working } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 2;

export async function showUpstreams() {
  const inside = el("div");
  const lead = el("span");
  const load = async () => {
    const said = await admin.get("/networks");
    put(lead, `As ${format.number(said.workers)} ${said.workers === 1 ? "worker sees" : "workers see"} them now.`);
    renew(inside, said.networks.length ? said.networks.map((network) => networkOf(network, load))
      : empty("No upstreams", "Name some in the settings: [[upstreams]] with network and url."));
  };
  const node = el("div", null, heading("Upstreams", { lead }), inside);
  await load();
  poll(node, REFRESH_S, load);
  return node;
}

/* One network, its upstreams first and then its bundlers. */
function networkOf({ network, tip, upstreams }, load) {
  return el("section.card", { "data-network": network }, el("div.spread", null, el("h2", null, network),
    el("span.hint", null, tip ? `block ${format.number(tip)}` : "no head known")),
  table(`Upstreams of ${network}`, [
    { name: "Upstream", show: (each) => [each.label, el("span.below", null, each.kind === "bundler" ? "bundler" : each.id)] },
    { name: "State", show: stateOf },
    { name: "Breaker", show: (each) => badge(each.breaker, each.breaker === "closed" ? "good" : each.breaker === "open" ? "bad" : "wait") },
    { name: "Lag", kind: "num", show: (each) => (each.lag_blocks === null ? format.NONE : `${format.number(each.lag_blocks)} blocks`) },
    { name: "Errors", kind: "num", show: (each) => el("div", null, format.percent(each.error_rate), each.error_rate > 0 && bar(each.error_rate, "bad")) },
    { name: "p50", kind: "num", show: (each) => format.millis(each.p50_ms) },
    { name: "p99", kind: "num", show: (each) => format.millis(each.p99_ms) },
    { name: "Answered", kind: "num", show: (each) => el("div", null, format.number(each.answered), each.in_flight > 0 && el("span.below", null, `${each.in_flight} in flight`)) },
    { name: "Actions", kind: "do", show: (each) => actionOf(each, load) },
  ], upstreams.map((each) => ({ data: each, attributes: { "data-id": each.id } }))));
}

const stateOf = (each) => el("div", null, badge(each.state), each.cordon && el("span.below", null,
  [each.cordon.reason, `by ${each.cordon.by} ${format.ago(each.cordon.at)}`].filter(Boolean).join(", ")));

function actionOf(each, load) {
  if (!each.cordoned) return button("Cordon", () => cordon(each, load), { kind: "small", "aria-label": `Cordon ${each.label}` });
  return working("Uncordon", async () => {
    await admin.post(`/upstreams/${encodeURIComponent(each.id)}/uncordon`);
    toast(`${each.label} takes calls again.`);
    await load();
  }, { kind: "small", "aria-label": `Uncordon ${each.label}` });
}

function cordon(each, load) {
  dialog(`Cordon ${each.label}`, (close) => {
    const reason = forms.text("Reason", { maxlength: "200", placeholder: "maintenance at 14:00", hint: "For whoever looks at this page next." });
    return [el("p", null, "It takes no more calls, in all workers, within a second. Calls under way finish."),
      forms.form(reason.node, {
        label: "Cordon",
        cancel: close,
        send: async () => {
          await admin.post(`/upstreams/${encodeURIComponent(each.id)}/cordon`, reason.read() ? { reason: reason.read() } : {});
          close();
          toast(`${each.label} takes no more calls.`);
          await load();
        },
      })];
  });
}
