/* Webhooks: the list, and making one. What became of its events is in deliveries.js. */

import { account, query } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { networkField, networks, wordOf } from "../networks.js";
import { badge, button, card, choice, dialog, empty, heading, pager, place, secret, table } from "../components.js";
import * as format from "../format.js";
import { FILTERS, filterForm } from "./filters.js";
import { showOne } from "./webhook.js";

const LIMIT = 25;
const STATUS = { "": "All", active: "Active", paused: "Paused", disabled: "Disabled" };

export async function show([id]) {
  if (id) return showOne(id);
  const wanted = { page: 1, status: "" };
  const list = place(async () => {
    const found = await account.get(`/webhooks${query({ page: wanted.page, limit: LIMIT, status: wanted.status })}`);
    return listOf(found, wanted, list.again);
  });
  await list.ready;
  return [heading("Webhooks", { lead: "When something happens on a chain, it is posted to an address of yours, signed.",
    actions: button("Create webhook", create, { kind: "main" }) }),
    card(null, el("div.spread", null, choice("Status", STATUS, wanted.status, (status) => {
      Object.assign(wanted, { status, page: 1 });
      list.again();
    })), list.node)];
}

function listOf({ webhooks, page, total }, wanted, again) {
  if (!webhooks.length && wanted.status) return empty(`No webhook is ${wanted.status}`);
  if (!webhooks.length) return empty("No webhooks yet", "Watch addresses, tokens, logs or blocks, and hear of them within seconds.",
    button("Create webhook", create, { kind: "main" }));
  return [table("Webhooks", [
    { name: "Address", show: (hook) => el("a", { href: `#/webhooks/${hook.id}` }, hook.url) },
    { name: "Event", show: (hook) => el("code", null, hook.event_type) },
    { name: "Chain", show: (hook) => hook.chain },
    { name: "Created", show: (hook) => format.date(hook.created_at) },
    { name: "Status", show: (hook) => badge(hook.status) },
  ], webhooks.map((hook) => ({ data: hook, attributes: { "data-id": hook.id } }))),
  pager({ page, total, limit: LIMIT }, (next) => {
    wanted.page = next;
    again();
  })];
}

/* The form follows the event type: each has a filter of its own. */
async function create() {
  const known = (await networks()).filter(({ family }) => family === "evm");
  dialog("Create webhook", (close) => {
    const url = forms.text("Address", { type: "url", required: true, placeholder: "https://hooks.example.com/penstock",
      hint: "HTTPS. It must answer 2xx within 15 seconds." });
    const chain = networkField("Chain", known, { valueOf: wordOf, hint: "ethereum, base, ethereum-sepolia …" });
    const grouped = { "Format A": {}, "Format B": {} };
    for (const type of Object.keys(FILTERS)) grouped[type === type.toLowerCase() ? "Format A" : "Format B"][type] = `${type}: ${FILTERS[type].about}`;
    const filter = filterForm();
    const type = forms.select("Event", grouped, { onchange: () => filter.follow(type.read()) });
    filter.follow(type.read());
    return forms.form([url.node, type.node, chain.node, filter.node], {
      label: "Create webhook",
      cancel: close,
      send: async () => {
        const made = await account.post("/webhooks", { url: url.read(), chain: chain.read(), event_type: type.read(), config: filter.read() });
        close();
        reveal(made);
      },
    });
  });
}

function reveal(made) {
  const node = dialog("Your webhook is watching", (close) => [
    el("p", null, "Deliveries are signed with this secret. Copy it now: it is shown this once."),
    secret(made.signing_secret, "The signing secret"),
    el("div.actions", null, button("Open it", close, { kind: "main" }))]);
  node.addEventListener("close", () => { location.hash = `#/webhooks/${made.id}`; });
}
