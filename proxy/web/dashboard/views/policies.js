/* Gas policies: what is sponsored, how much of it is spent, and by whose rules. */

import { account, query } from "../api.js";
import { bar, el } from "../dom.js";
import * as forms from "../forms.js";
import { networkField, networks, wordOf } from "../networks.js";
import { badge, button, card, dialog, empty, heading, pager, place, table, toast } from "../components.js";
import * as format from "../format.js";
import { showOne } from "./policy.js";
import { RESETS, rulesForm } from "./rules.js";

const LIMIT = 25;

export async function show([id]) {
  if (id) return showOne(id);
  const wanted = { page: 1 };
  const list = place(async () => {
    const found = await account.get(`/gas/policies${query({ ...wanted, limit: LIMIT })}`);
    const spent = await Promise.all(found.policies.map((policy) => account.get(`/gas/policies/${policy.id}/spend${query({ limit: 1 })}`)));
    return listOf(found, spent, (page) => {
      wanted.page = page;
      list.again();
    });
  });
  await list.ready;
  return [heading("Gas policies", { lead: "Whose operations you pay for, and up to which sum.",
    actions: button("Create policy", create, { kind: "main" }) }), card(null, list.node)];
}

function listOf({ policies, page, total }, spent, go) {
  if (!policies.length) return empty("No gas policies yet", "A policy says which operations are sponsored, and how much they may cost.",
    button("Create policy", create, { kind: "main" }));
  const rows = policies.map((policy, at) => ({ data: { ...policy, spend: spent[at] }, attributes: { "data-id": policy.id } }));
  return [table("Gas policies", [
    { name: "Name", show: (policy) => el("a", { href: `#/policies/${policy.id}` }, policy.name) },
    { name: "Chain", show: (policy) => policy.network },
    { name: "Spent", show: ({ rules, spend }) => spentOf(rules, spend) },
    { name: "Operations", kind: "num", show: ({ spend }) => format.number(spend.operations) },
    { name: "Status", show: (policy) => badge(policy.status) },
  ], rows), pager({ page, total, limit: LIMIT }, go)];
}

/* What is spent and what is held, against the cap where there is one. */
export function spentOf(rules, spend) {
  const used = Number(spend.spent_usd) + Number(spend.reserved_usd);
  const cap = rules.max_total_usd;
  const share = cap ? used / Number(cap) : 0;
  return el("div", null, cap ? `${format.usd(spend.spent_usd)} of ${format.usd(cap)}` : `${format.usd(spend.spent_usd)}, no cap`,
    cap && bar(share, share > 0.9 ? "bad" : share > 0.7 ? "wait" : ""),
    el("span.below", null, [Number(spend.reserved_usd) > 0 && `${format.usd(spend.reserved_usd)} held`,
      RESETS[spend.reset] && `starts anew ${spend.reset}`].filter(Boolean).join(", ")));
}

async function create() {
  const known = (await networks()).filter(({ family }) => family === "evm");
  dialog("Create policy", (close) => {
    const name = forms.text("Name", { required: true, maxlength: "200", placeholder: "Free token transfers" });
    const chain = networkField("Chain", known, { valueOf: wordOf, hint: "ethereum, base, ethereum-sepolia …" });
    const rules = rulesForm({});
    return forms.form([forms.row(name.node, chain.node), rules.node], {
      label: "Create policy",
      cancel: close,
      send: async () => {
        const made = await account.post("/gas/policies", { name: name.read(), chain: chain.read(), rules: rules.read() });
        close();
        toast("The policy is active.");
        location.hash = `#/policies/${made.id}`;
      },
    });
  });
}
