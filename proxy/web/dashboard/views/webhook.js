/* One webhook: what it watches, what can be done with it, and the log of its deliveries. */

import { account, query } from "../api.js";
import { el, put } from "../dom.js";
import * as forms from "../forms.js";
import { badge, button, card, codeBlock, confirm, dialog, empty, facts, heading, note, pager, place, poll, secret, table, toast, working } from "../components.js";
import * as format from "../format.js";
import { filterForm } from "./filters.js";

const LIMIT = 20;
const STATES = { "": "all", pending: "pending", delivered: "delivered", failed: "failed", parked: "parked", held: "held", taken_back: "taken back" };
const OUTCOMES = {
  timeout: "no answer in time", unreachable: "no connection", reset: "the connection was lost",
  refused: "the address is not a public one", invalid: "what came was no HTTP",
};
// How long a test event is watched before people are sent to the log.
const WATCH_S = 60;

export async function showOne(id) {
  const view = new One(id);
  await view.load();
  poll(view.node, 3, () => view.log.again());
  return view.node;
}

class One {
  #path;
  #wanted = { page: 1, status: "" };
  #open = new Set();
  #head = el("div");
  #test = el("div", { "aria-live": "polite" });

  constructor(id) {
    this.#path = `/webhooks/${encodeURIComponent(id)}`;
    this.log = place(() => this.#deliveries(), 4);
    const filter = forms.select("Show", STATES, { onchange: () => {
      Object.assign(this.#wanted, { status: filter.read(), page: 1 });
      this.log.again();
    } });
    this.node = el("div", null, el("a.crumb", { href: "#/webhooks" }, "← Webhooks"), this.#head,
      el("section.card", { "aria-label": "Deliveries" },
        el("div.spread", null, el("h2", null, "Deliveries"), el("div.filter", null, filter.control,
          button("Redeliver …", () => this.#redeliverSince(), { kind: "small" }),
          working("Send test event", () => this.#sendTest(), { kind: "small", class: "small main" }))),
        this.#test, this.log.node));
    filter.control.setAttribute("aria-label", "Show deliveries that are");
  }

  async load() {
    const hook = await account.get(this.#path);
    put(this.#head, heading(hook.url, { actions: this.#actions(hook) }),
      hook.status !== "active" && note(whyNot(hook), "wait"),
      card(null, facts([["Status", badge(hook.status)], ["Event", el("code", null, hook.event_type)], ["Chain", hook.chain],
        ["Id", el("code", null, hook.id)], ["Created", format.time(hook.created_at)], ["Changed", format.time(hook.updated_at)]]),
      el("details.more", null, el("summary", null, "Filter"), codeBlock("config", JSON.stringify(hook.config, null, 2)).node)));
    return hook;
  }

  #actions(hook) {
    const act = (label, work, said, options) => working(label, async () => {
      await work();
      toast(said);
      await this.load();
      await this.log.again();
    }, options);
    return [
      hook.status === "active"
        ? act("Pause", () => account.patch(this.#path, { status: "paused" }), "The webhook is paused.")
        : act("Resume", () => account.post(`${this.#path}/resume`), "The webhook is active again.", { kind: "main" }),
      button("Edit", () => this.#edit(hook)),
      button("Rotate secret", () => this.#rotate()),
      button("Delete", () => this.#remove(hook), { kind: "danger" }),
    ];
  }

  #edit(hook) {
    dialog("Edit webhook", (close) => {
      const url = forms.text("Address", { type: "url", required: true, value: hook.url });
      const filter = filterForm(hook.config);
      filter.show();
      return forms.form([url.node, filter.node], {
        label: "Save",
        cancel: close,
        send: async () => {
          const config = filter.read();
          const changed = JSON.stringify(config) !== JSON.stringify(hook.config);
          await account.patch(this.#path, { ...(url.read() !== hook.url && { url: url.read() }), ...(changed && { config }) });
          close();
          toast("Saved.");
          await this.load();
        },
      });
    });
  }

  #rotate() {
    confirm("Rotate secret", "A new secret signs from now on. The old one signs beside it for a day, so that receivers can change over.",
      "Rotate", async () => {
        const made = await account.post(`${this.#path}/rotate`);
        dialog("The new secret", (close) => [el("p", null, "Copy it now: it is shown this once."),
          secret(made.signing_secret, "The signing secret"),
          el("p.hint", null, `The old one signs until ${format.time(made.previous_secret_valid_until)}.`),
          el("div.actions", null, button("I have it", close, { kind: "main" }))]);
      });
  }

  #remove(hook) {
    confirm("Delete webhook", `${hook.url} hears of nothing from now on, and its log is gone. This cannot be undone.`, "Delete", async () => {
      await account.remove(this.#path);
      toast("The webhook is deleted.");
      location.hash = "#/webhooks";
    });
  }

  /* --- deliveries --- */

  async #deliveries() {
    const found = await account.get(`${this.#path}/deliveries${query({ ...this.#wanted, limit: LIMIT })}`);
    if (!found.deliveries.length) return this.#wanted.status ? empty(`No delivery is ${this.#wanted.status}`)
      : empty("Nothing was delivered yet", "Send a test event to see how it arrives.");
    return [el("div.log", null, found.deliveries.map((delivery) => this.#entry(delivery))),
      pager({ page: found.page, total: found.total, limit: LIMIT }, (page) => {
        this.#wanted.page = page;
        this.log.again();
      })];
  }

  /* Open entries stay open when the log is read again. */
  #entry(delivery) {
    const { event_id: id, attempts } = delivery;
    const last = attempts.at(-1);
    const node = el("details", { open: this.#open.has(id), "data-event": id, ontoggle: () => (node.open ? this.#open.add(id) : this.#open.delete(id)) },
      el("summary", null, el("span", null, badge(delivery.status)),
        el("span.what", null, delivery.event_type, delivery.test && [" ", badge("test", "off")], el("code", null, id)),
        el("span.when", null, last ? `${resultOf(last)} · ` : "", format.time(delivery.created_at))),
      el("div.detail", null,
        el("p.hint", null, `${attempts.length} ${attempts.length === 1 ? "attempt" : "attempts"}`,
          delivery.next_attempt_at && `, the next ${format.ago(delivery.next_attempt_at)}`,
          delivery.block_number !== null && `, block ${format.number(delivery.block_number)}`),
        attempts.length > 0 && attemptsOf(attempts),
        el("div.actions", null, working("Redeliver", async () => {
          await account.post(`${this.#path}/deliveries/${encodeURIComponent(id)}/redeliver`);
          toast("It is on its way again.");
          await this.log.again();
        }, { kind: "small" }))));
    return node;
  }

  #redeliverSince() {
    dialog("Redeliver", (close) => {
      const yesterday = new Date(Date.now() - 86400000 - new Date().getTimezoneOffset() * 60000).toISOString().slice(0, 16);
      const since = forms.text("Events since", { type: "datetime-local", required: true, value: yesterday });
      const status = forms.select("Which", { failed: "failed ones", "": "all of them" });
      return forms.form(forms.row(since.node, status.node), {
        label: "Redeliver",
        cancel: close,
        send: async () => {
          const wanted = { since: new Date(since.read()).toISOString(), ...(status.read() && { status: status.read() }) };
          const said = await account.post(`${this.#path}/redeliver`, wanted);
          close();
          toast(`${format.number(said.redelivering)} are on their way again.`);
          await this.log.again();
        },
      });
    });
  }

  /* Sends an event of nothing that happened, and says what becomes of it. */
  async #sendTest() {
    const { event_id: id } = await account.post(`${this.#path}/test`);
    put(this.#test, note("The test event is on its way …", "wait"));
    const until = Date.now() + WATCH_S * 1000;
    while (Date.now() < until && this.node.isConnected) {
      const { deliveries } = await account.get(`${this.#path}/deliveries${query({ limit: LIMIT })}`);
      const found = deliveries.find((delivery) => delivery.event_id === id);
      const last = found?.attempts.at(-1);
      if (found?.status === "delivered") put(this.#test, note(`The test event arrived: ${resultOf(last)}.`, "good"));
      else if (last) put(this.#test, note(`The test event did not get through: ${resultOf(last)}.`, "bad"));
      if (last) break;
      await new Promise((resolve) => { setTimeout(resolve, 400); });
    }
    await this.log.again();
  }
}

const resultOf = (attempt) => `${attempt.status_code ?? OUTCOMES[attempt.outcome] ?? attempt.outcome} in ${format.millis(attempt.duration_ms)}`;

function attemptsOf(attempts) {
  return table("Attempts", [
    { name: "Attempt", show: (each) => String(each.number) },
    { name: "When", show: (each) => format.time(each.started_at) },
    { name: "Took", kind: "num", show: (each) => format.millis(each.duration_ms) },
    { name: "Answer", show: (each) => each.status_code ? badge(String(each.status_code), each.status_code < 300 ? "good" : "bad") : OUTCOMES[each.outcome] ?? each.outcome },
    { name: "How it begins", show: (each) => (each.response_excerpt ? el("code", null, each.response_excerpt) : format.NONE) },
  ], attempts);
}

const REASONS = {
  owner: "Paused.", failures: "Paused: every retry of a delivery failed.",
  gone: "Disabled: the receiver answered 410 (gone).", operator: "Disabled by the operator.",
};

function whyNot(hook) {
  const why = REASONS[hook.status_reason] ?? `${format.plain(hook.status)}.`;
  return hook.status === "paused" ? `${why} Events are kept meanwhile, and go out when it is resumed.` : `${why} Nothing is watched until it is resumed.`;
}
