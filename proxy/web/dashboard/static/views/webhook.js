/* One webhook: its settings, its actions and its delivery log. */

import { account, query } from "../api.js";
import { el, refreshChildren, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { networkOf, networks } from "../networks.js";
import { asyncButton, asyncRegion, badge, button, card, codeBlock, confirm, dialog, empty, facts, heading, idField, idText, moment, note, pager, poll, secretDialog, secretField, table, toast } from "../components.js";
import * as format from "../format.js";
import { eventOf, EVENTS, filterForm, formatOf, FORMATS, LABELS, watchesNothing } from "./filters.js";
import { eventsOf, healthOf, isSuccess, lastFailureOf, outcomeOf, resultOf, statusBadge } from "./health.js";
import { highlighted } from "./json.js";

const LIMIT = 20;
const STATUSES = ["pending", "delivered", "failed", "parked", "held", "taken_back"];
const FILTER = { "": "All statuses", ...Object.fromEntries(STATUSES.map((status) => [status, format.label(status)])) };
// How long to wait for the result of a test event before leaving it to the log.
const WATCH_S = 60;

export async function showWebhook(id) {
  const view = new WebhookView(id);
  await view.load();
  poll(view.node, 3, () => view.refresh());
  return view.node;
}

class WebhookView {
  #path;
  #filters = { page: 1, status: "" };
  #open = new Set();
  #exchanges = new Map();
  #head = el("div");
  #test = null;
  #backtest = "";
  #testResult = el("div", { "aria-live": "polite" });

  constructor(id) {
    this.#path = `/webhooks/${encodeURIComponent(id)}`;
    this.log = asyncRegion(() => this.#deliveries(), 4);
    const filter = forms.select("Status", FILTER, { onchange: () => {
      Object.assign(this.#filters, { status: filter.read(), page: 1 });
      this.log.reload();
    } });
    this.node = el("div", null, el("a.crumb", { href: "#/webhooks" }, "← Webhooks"), this.#head,
      el("section.card", { "aria-label": "Deliveries" },
        el("div.spread", null, el("h2", null, "Deliveries"), el("div.filter", null, filter.control,
          account.can("manage") && [button("Redeliver…", () => this.#redeliverSince(), { kind: "small" }),
            asyncButton("Send test event", () => this.#sendTest(), { kind: "small", class: "small main" })])),
        this.#testResult, this.log.node));
    filter.control.setAttribute("aria-label", "Filter by status");
  }

  async load() {
    const hook = await account.get(this.#path);
    refreshChildren(this.#head, heading(hook.url, { actions: this.#actions(hook) }),
      hook.status !== "active" && note(statusText(hook), "wait"),
      hook.status === "active" && watchesNothing(hook) && note("This webhook watches nothing, so it will never have an event. Edit it to add a filter."),
      hook.status === "active" && !watchesNothing(hook) && this.#silence(hook),
      hook.status === "active" && hook.health.failing && note("None of the last attempts was delivered. Open a delivery to see the replies of your endpoint."),
      card(null, facts([["Status", statusBadge(hook)], ["Event", [EVENTS[eventOf(hook.event_type)].name, el("span.below", null, `${FORMATS[formatOf(hook.event_type)][0]}, `, el("code", null, hook.event_type))]], ["Network", networkOf(hook.chain, await networks())],
        ["Webhook ID", idField(hook.id)], ["Events, 24 h", eventsOf(hook)], ["Delivered", healthOf(hook)], ["Last failure", lastFailureOf(hook)],
        ["Created", moment(hook.created_at)], ["Updated", moment(hook.updated_at)],
        ...(hook.fault ? [["Faults", el("code", null, hook.fault)]] : [])]),
      el("details.more", null, el("summary", null, "Filter"), codeBlock("config", JSON.stringify(hook.config, null, 2)).node)));
    return hook;
  }

  /* A webhook without events of the last day: its filter may never match, which a back-test shows. */
  #silence(hook) {
    if (hook.health.events_last_day > 0) return null;
    if (this.#backtest) return note(`0 events matched in the last 24 h; ${this.#backtest}`, "wait");
    // Pending transactions are not in past blocks.
    const isTestable = account.can("manage") && hook.event_type !== "PENDING_TRANSACTION";
    return el("div.note.wait.spread", { role: "status" }, el("span", null, "0 events matched in the last 24 h."),
      isTestable && asyncButton("Back-test", () => this.#runBacktest(hook), { kind: "small", title: "Counts the events that this filter has in the newest blocks. Costs compute units." }));
  }

  async #runBacktest({ chain, event_type, config }) {
    const { events, from_block: first, to_block: last } = await account.post("/webhooks/backtest", { chain, event_type, config });
    const blocks = `the last ${format.counted(last - first + 1, "block")}`;
    this.#backtest = `the back-test finds ${format.number(events)} in ${blocks}. ${events
      ? "Events before the webhook was created are not sent." : "Check the addresses and the other values of the filter."}`;
    await this.load();
  }

  /* The head stays as it is while a part of it is open. */
  async refresh() {
    if (!this.#head.querySelector("details[open]")) await this.load();
    await this.log.reload();
  }

  #actions(hook) {
    const action = (label, work, done, options) => asyncButton(label, async () => {
      await work();
      toast(done);
      await this.load();
      await this.log.reload();
    }, options);
    return account.can("manage") && [
      hook.status === "active" || hook.status === "starting"
        ? action("Pause", () => account.patch(this.#path, { status: "paused" }), "Webhook paused")
        : action("Resume", () => account.post(`${this.#path}/resume`), "Webhook resumed", { kind: "main" }),
      button("Edit", () => this.#edit(hook)),
      button("Rotate secret", () => this.#rotate()),
      button("Delete", () => this.#remove(hook), { kind: "danger" }),
    ];
  }

  #edit(hook) {
    dialog("Edit webhook", (close) => {
      const url = forms.text("Endpoint URL", { type: "url", required: true, value: hook.url });
      const filter = filterForm(hook.config);
      filter.showJson();
      // Only webhooks that were created with a test key can have faults.
      const hasFault = "fault" in hook;
      const fault = forms.text("Faults", { value: hook.fault, maxlength: "200", placeholder: "delay=2s, duplicate=1, correction, p=0.2",
        hint: "Spoils the deliveries, to test how a receiver handles failures. Leave empty for none." });
      return forms.form([url.node, filter.node, hasFault && fault.node], {
        label: "Save changes",
        labels: LABELS,
        cancel: close,
        send: async () => {
          const config = filter.read();
          const changed = JSON.stringify(config) !== JSON.stringify(hook.config);
          await account.patch(this.#path, { ...(url.read() !== hook.url && { url: url.read() }), ...(changed && { config }),
            ...(hasFault && fault.read() !== (hook.fault ?? "") && { fault: fault.read() }) });
          close();
          this.#backtest = "";
          toast("Webhook updated");
          await this.load();
        },
      });
    });
  }

  #rotate() {
    confirm("Rotate secret", "Deliveries are signed with the new and the old secret for a day, so that you can update your receiver.",
      "Rotate secret", async () => {
        const rotated = await account.post(`${this.#path}/rotate`);
        secretDialog("New signing secret", (close) => [el("p", null, "Copy this secret now. You cannot see it again."),
          secretField(rotated.signing_secret, "Signing secret"),
          el("p.hint", null, `The old secret is valid until ${format.time(rotated.previous_secret_valid_until)}.`),
          el("div.actions", null, button("Done", close, { kind: "main" }))]);
      });
  }

  #remove(hook) {
    confirm("Delete webhook", `${hook.url} stops receiving events, and its delivery log is deleted. This cannot be undone.`, "Delete webhook", async () => {
      await account.remove(this.#path);
      toast("Webhook deleted");
      location.hash = "#/webhooks";
    });
  }

  /* --- deliveries --- */

  async #deliveries() {
    const found = await account.get(`${this.#path}/deliveries${query({ ...this.#filters, limit: LIMIT })}`);
    this.#showTest(found.deliveries);
    if (!found.deliveries.length) return this.#filters.status ? empty("No deliveries with this status")
      : empty("No deliveries yet", "Send a test event to try your endpoint.");
    return [el("div.log", null, found.deliveries.map((delivery) => this.#entry(delivery))),
      pager({ page: found.page, total: found.total, limit: LIMIT }, (page) => {
        this.#filters.page = page;
        this.log.reload();
      })];
  }

  /* Expanded entries stay expanded when the log is refreshed. */
  #entry(delivery) {
    const { event_id: id, attempts } = delivery;
    const last = attempts.at(-1);
    const exchange = el("div");
    const onOpen = () => this.#showExchange(exchange, id, attempts.length);
    return this.#remembered(id, { "data-event": id }, onOpen,
      el("summary", null, el("span", null, badge(delivery.status)),
        el("span.event", null, delivery.event_type, delivery.test && [" ", badge("test", "off")], idText(id)),
        el("span.time", null, last ? `${resultOf(last)} · ` : "", format.time(delivery.created_at))),
      el("div.detail", null,
        el("p.hint", null, `${attempts.length} ${attempts.length === 1 ? "attempt" : "attempts"}`,
          delivery.next_attempt_at && ` · next ${format.ago(delivery.next_attempt_at)}`,
          delivery.block_number !== null && ` · block ${format.number(delivery.block_number)}`),
        attempts.length > 0 && attemptsTable(attempts), exchange,
        account.can("manage") && el("div.actions", null, asyncButton("Redeliver", async () => {
          await account.post(`${this.#path}/deliveries/${encodeURIComponent(id)}/redeliver`);
          toast("Event queued for redelivery");
          await this.log.reload();
        }, { kind: "small" }))));
  }

  /* A section that stays open when the log is refreshed. `onOpen` is called when it is or becomes open. */
  #remembered(name, attributes, onOpen, ...inside) {
    const isOpen = this.#open.has(name);
    const node = el("details", { ...attributes, open: isOpen, ontoggle: () => {
      if (node.open === this.#open.has(name)) return;
      if (node.open) this.#open.add(name);
      else this.#open.delete(name);
      if (node.open) onOpen();
    } }, inside);
    if (isOpen) onOpen();
    return node;
  }

  /* The payload, and what each attempt sent and received. Read again after another attempt. */
  async #showExchange(region, id, count) {
    const kept = this.#exchanges.get(id);
    setChildren(region, kept?.nodes);
    if (kept?.count === count) return;
    try {
      const { payload, attempts } = await account.get(`${this.#path}/deliveries/${encodeURIComponent(id)}`);
      const body = codeBlock("Payload", "");
      body.show(highlighted(payload));
      const nodes = [body.node, ...attempts.map((attempt) => this.#attempt(id, attempt))];
      this.#exchanges.set(id, { count, nodes });
      refreshChildren(region, nodes);
    } catch (failure) {
      setChildren(region, note(failure.message));
    }
  }

  #attempt(id, attempt) {
    const { number, request_headers: sent, response_headers: headers, response_body: body } = attempt;
    const block = (label, text) => text && codeBlock(label, text).node;
    return this.#remembered(`${id} ${number}`, { class: "more" }, () => {}, el("summary", null, `Attempt ${number}: ${resultOf(attempt)}`),
      sent ? [block("Request headers", sent), block("Response headers", headers), block("Response body", body)]
        : el("p.hint", null, "Nothing was sent, or nothing was recorded."));
  }

  #redeliverSince() {
    dialog("Redeliver events", (close) => {
      const yesterday = new Date(Date.now() - 86400000 - new Date().getTimezoneOffset() * 60000).toISOString().slice(0, 16);
      const since = forms.text("Events since", { type: "datetime-local", required: true, value: yesterday });
      const status = forms.select("Deliveries", { failed: "Failed only", "": "All" });
      return forms.form(forms.row(since.node, status.node), {
        label: "Redeliver",
        labels: { since: "Events since", status: "Deliveries" },
        cancel: close,
        send: async () => {
          const selection = { since: new Date(since.read()).toISOString(), ...(status.read() && { status: status.read() }) };
          const { redelivering } = await account.post(`${this.#path}/redeliver`, selection);
          close();
          toast(`${format.number(redelivering)} ${redelivering === 1 ? "event" : "events"} queued for redelivery`);
          await this.log.reload();
        },
      });
    });
  }

  /* Shows the result of the test event's last attempt, if it is among these deliveries. A later attempt replaces the first one's. */
  #showTest(deliveries) {
    const last = deliveries.find((delivery) => delivery.event_id === this.#test)?.attempts.at(-1);
    if (last) setChildren(this.#testResult, isSuccess(last) ? note(`Test event delivered: ${resultOf(last)}`, "good") : note(`Test event failed: ${resultOf(last)}`, "bad"));
    return Boolean(last);
  }

  /* Sends a made-up event and shows the result of its first attempt. */
  async #sendTest() {
    this.#test = (await account.post(`${this.#path}/test`)).event_id;
    setChildren(this.#testResult, note("Sending test event…", "wait"));
    const until = Date.now() + WATCH_S * 1000;
    while (Date.now() < until && this.node.isConnected) {
      const { deliveries } = await account.get(`${this.#path}/deliveries${query({ limit: LIMIT })}`);
      if (this.#showTest(deliveries)) break;
      await new Promise((resolve) => { setTimeout(resolve, 400); });
    }
    await this.log.reload();
  }
}

function attemptsTable(attempts) {
  return table("Attempts", [
    { name: "Attempt", show: (each) => String(each.number) },
    { name: "Time", show: (each) => format.time(each.started_at) },
    { name: "Duration", kind: "num", show: (each) => format.millis(each.duration_ms) },
    { name: "Response", show: (each) => (each.status_code ? badge(String(each.status_code), isSuccess(each) ? "good" : "bad") : outcomeOf(each)) },
    { name: "Response body", show: (each) => (each.response_excerpt ? el("code", null, each.response_excerpt) : format.NONE) },
  ], attempts);
}

const REASONS = {
  owner: "This webhook is paused.", failures: "This webhook was paused because all retries of a delivery failed.",
  gone: "This webhook was disabled because its endpoint returned 410 Gone.", operator: "An operator disabled this webhook.",
  mempool: "This webhook is starting: no upstream of the network shows its mempool at the moment.",
};
const CONSEQUENCES = {
  paused: "Events are kept and delivered when you resume it.",
  disabled: "Events are not recorded until you resume it.",
  starting: "Transactions sent before it is active are not reported.",
};

function statusText(hook) {
  const reason = REASONS[hook.status_reason] ?? `This webhook is ${hook.status}.`;
  return `${reason} ${CONSEQUENCES[hook.status]}`;
}
