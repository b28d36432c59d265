/* Webhooks: the list, and creating a webhook. webhook.js shows a single one with its deliveries. */

import { account, query } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { chainNameOf, networkField, networkOf, networks, networksWith } from "../networks.js";
import { asyncRegion, button, card, dialog, empty, heading, pager, secretDialog, secretField, segmentedControl, table } from "../components.js";
import * as format from "../format.js";
import { eventOf, EVENTS, filterForm, formatOf, FORMATS, LABELS, missingFormats, typeOf, watchesNothing } from "./filters.js";
import { eventsOf, healthOf, lastFailureOf, statusBadge } from "./health.js";

const LIMIT = 25;
const STATUS = { "": "All", active: "Active", paused: "Paused", disabled: "Disabled" };

export async function show([id]) {
  if (id) return (await import("./webhook.js")).showWebhook(id);
  const filters = { page: 1, status: "" };
  const list = asyncRegion(async () => {
    const [found, all] = await Promise.all([account.get(`/webhooks${query({ page: filters.page, limit: LIMIT, status: filters.status })}`), networks()]);
    return webhooksTable(found, all, filters, list.reload);
  });
  await list.ready;
  return [heading("Webhooks", { lead: "Receive a signed POST request when something happens on chain.",
    actions: account.can("manage") && button("Create webhook", create, { kind: "main" }) }),
    card(null, el("div.spread", null, segmentedControl("Status", STATUS, filters.status, (status) => {
      Object.assign(filters, { status, page: 1 });
      list.reload();
    })), list.node)];
}

function webhooksTable({ webhooks, page, total }, all, filters, reload) {
  if (!webhooks.length && filters.status) return empty(`No ${filters.status} webhooks`);
  if (!webhooks.length) return empty("No webhooks yet", "Get notified within seconds about addresses, tokens, logs or blocks.",
    account.can("manage") && button("Create webhook", create, { kind: "main" }));
  return [table("Webhooks", [
    { name: "Endpoint URL", show: (hook) => el("a", { href: `#/webhooks/${hook.id}` }, hook.url) },
    { name: "Event", show: (hook) => [EVENTS[eventOf(hook.event_type)].name, el("span.below", null, `${networkOf(hook.chain, all)} · ${FORMATS[formatOf(hook.event_type)][0]}`)] },
    { name: "Events, 24 h", kind: "num", show: eventsOf },
    { name: "Delivered", show: healthOf },
    { name: "Last failure", show: lastFailureOf },
    { name: "Created", show: (hook) => format.date(hook.created_at) },
    { name: "Status", show: statusBadge },
  ], webhooks.map((hook) => ({ data: hook, attributes: { "data-id": hook.id } }))),
  pager({ page, total, limit: LIMIT }, (next) => {
    filters.page = next;
    reload();
  })];
}

/* The filter fields depend on the event type. */
async function create() {
  const choices = await networksWith("webhooks");
  dialog("Create webhook", (close) => {
    const url = forms.text("Endpoint URL", { type: "url", required: true, placeholder: "https://hooks.example.com/penstock",
      hint: "An HTTPS URL that responds with 2xx within 15 seconds." });
    const network = networkField("Network", choices, { valueOf: chainNameOf, hint: "For example ethereum, base or ethereum-sepolia." });
    const filter = filterForm();
    const wire = forms.choice("Format", FORMATS, "b");
    const choose = () => {
      filter.setType(event.read());
      wire.disable(missingFormats(event.read()));
    };
    const event = forms.select("Event", Object.fromEntries(Object.entries(EVENTS).map(([key, { name }]) => [key, name])), { onchange: choose });
    choose();
    return forms.form([url.node, event.node, network.node, filter.node, wire.node], {
      label: "Create webhook",
      labels: LABELS,
      cancel: close,
      send: async () => {
        const webhook = { url: url.read(), chain: network.read(), event_type: typeOf(event.read(), wire.read()), config: filter.read() };
        if (watchesNothing(webhook)) throw new Error("Fill in the filter: an empty one matches nothing, so no event would ever be sent");
        const created = await account.post("/webhooks", webhook);
        close();
        reveal(created, wire.read());
      },
    });
  });
}

const VERIFY = {
  b: "X-Platform-Signature is sha256= and the hex HMAC-SHA256 of the body, with the whole secret as the key.",
  a: "X-Service-Signature is the hex HMAC-SHA256 of X-Service-Timestamp, a dot and the body, with the whole secret as the key.",
  standard: "Give the secret to a Standard Webhooks library, with the headers webhook-id, webhook-timestamp and webhook-signature.",
};

function reveal(webhook, wire) {
  const node = secretDialog("Webhook created", (close) => [
    el("p", null, "Verify deliveries with this signing secret. Copy it now. You cannot see it again."),
    secretField(webhook.signing_secret, "Signing secret"),
    el("p.hint", null, VERIFY[wire], " ", el("a", { href: "/docs#receiving-webhooks" }, "Receivers in Python, Node and Go")),
    el("div.actions", null, button("View webhook", close, { kind: "main" }))]);
  node.addEventListener("close", () => { location.hash = `#/webhooks/${webhook.id}`; });
}
