/* Gas policies: the list with its spend, and creating a policy. */

import { account, query } from "../api.js";
import { bar, el } from "../dom.js";
import * as forms from "../forms.js";
import { chainNameOf, networkField, networksWith } from "../networks.js";
import { asyncRegion, badge, button, card, dialog, empty, heading, pager, table, toast } from "../components.js";
import * as format from "../format.js";
import { LABELS, RESETS, rulesForm } from "./rules.js";

const LIMIT = 25;

export async function show([id]) {
  if (id) return (await import("./policy.js")).showPolicy(id);
  const filters = { page: 1 };
  const list = asyncRegion(async () => {
    const found = await account.get(`/gas/policies${query({ ...filters, limit: LIMIT })}`);
    return policiesTable(found, (page) => {
      filters.page = page;
      list.reload();
    });
  });
  await list.ready;
  return [heading("Gas policies", { lead: "Sponsor gas for your users, within the limits you set.",
    actions: account.can("manage") && button("Create policy", create, { kind: "main" }) }), card(null, list.node)];
}

function policiesTable({ policies, page, total }, go) {
  if (!policies.length) return empty("No gas policies yet", "A policy defines which operations you sponsor and how much they may cost.",
    account.can("manage") && button("Create policy", create, { kind: "main" }));
  const rows = policies.map((policy) => ({ data: policy, attributes: { "data-id": policy.id } }));
  return [table("Gas policies", [
    { name: "Name", show: (policy) => el("a", { href: `#/policies/${policy.id}` }, policy.name) },
    { name: "Network", show: (policy) => policy.network },
    { name: "Spent", show: ({ rules, spend }) => spendOf(rules, spend) },
    { name: "Operations", kind: "num", show: ({ spend }) => format.number(spend.operations) },
    { name: "Status", show: (policy) => badge(policy.status) },
  ], rows), pager({ page, total, limit: LIMIT }, go)];
}

/* The spent and reserved amounts, against the limit if there is one. */
export function spendOf(rules, spend) {
  const used = Number(spend.spent_usd) + Number(spend.reserved_usd);
  const limit = rules.max_total_usd;
  const share = limit ? used / Number(limit) : 0;
  return el("div", null, limit ? `${format.usd(spend.spent_usd)} of ${format.usd(limit)}` : `${format.usd(spend.spent_usd)}, no limit`,
    limit && bar(share, share > 0.9 ? "bad" : share > 0.7 ? "wait" : ""),
    el("span.below", null, [Number(spend.reserved_usd) > 0 && `${format.usd(spend.reserved_usd)} reserved`,
      RESETS[spend.reset] && `resets ${spend.reset}`].filter(Boolean).join(", ")));
}

async function create() {
  const choices = await networksWith("user_operations");
  dialog("Create policy", (close) => {
    const name = forms.text("Name", { required: true, maxlength: "200", placeholder: "Free token transfers" });
    const network = networkField("Network", choices, { valueOf: chainNameOf, hint: "For example ethereum, base or ethereum-sepolia." });
    const rules = rulesForm({});
    return forms.form([forms.row(name.node, network.node), rules.node], {
      label: "Create policy",
      labels: LABELS,
      cancel: close,
      send: async () => {
        const policy = await account.post("/gas/policies", { name: name.read(), chain: network.read(), rules: rules.read() });
        close();
        toast("Policy created");
        location.hash = `#/policies/${policy.id}`;
      },
    });
  });
}
