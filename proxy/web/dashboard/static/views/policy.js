/* One gas policy: its spend by day and by sender, its rules, and its recent refusals. */

import { account, query } from "../api.js";
import { Chart } from "../chart.js";
import { el, refreshChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, badge, button, card, codeBlock, confirm, dialog, empty, facts, heading, idField, idText, moment, note, pager, poll, table, toast } from "../components.js";
import * as format from "../format.js";
import { spendOf } from "./policies.js";
import { LABELS, rulesForm } from "./rules.js";

const LIMIT = 20;
const DAY_S = 86400;

export async function showPolicy(id) {
  const view = new PolicyView(id);
  await view.load();
  poll(view.node, 5, () => view.load());
  return view.node;
}

class PolicyView {
  #path;
  #head = el("div");
  #senders = el("div");
  #refusals = el("div");
  #page = 1;
  #isRulesOpen = false;
  #chart = new Chart("Spend per day", { format: format.usd, syncKey: "spend" });

  constructor(id) {
    this.#path = `/gas/policies/${encodeURIComponent(id)}`;
    this.node = el("div", null, el("a.crumb", { href: "#/policies" }, "← Gas policies"), this.#head, this.#chart.node,
      el("p"), card("Senders", this.#senders), this.#refusals);
  }

  async load() {
    const [policy, spend] = await Promise.all([
      account.get(this.#path), account.get(`${this.#path}/spend${query({ page: this.#page, limit: LIMIT })}`)]);
    this.#showHead(policy, spend);
    this.#showDays(spend);
    this.#showSenders(spend);
    await this.#showRefusals();
  }

  #showHead(policy, spend) {
    const isActive = policy.status === "active";
    const toggle = asyncButton(isActive ? "Pause" : "Resume", async () => {
      await account.patch(this.#path, { status: isActive ? "paused" : "active" });
      toast(isActive ? "Policy paused" : "Policy resumed");
      await this.load();
    }, { kind: isActive ? "" : "main" });
    refreshChildren(this.#head, heading(policy.name, { actions: account.can("manage") && [toggle, button("Edit", () => this.#edit(policy)),
      button("Delete", () => this.#remove(policy), { kind: "danger" })] }),
    !isActive && note("This policy is paused. New operations are not sponsored; existing sponsorships stay valid.", "wait"),
    card(null, facts([["Status", badge(policy.status)], ["Network", policy.network], ["Spent", spendOf(policy.rules, spend)],
      ["Operations", format.number(spend.operations)], ["Remaining", spend.left_usd === null ? "No limit" : format.usd(spend.left_usd)],
      ["Resets", spend.resets_at ? moment(spend.resets_at) : "Never"], ["Policy ID", idField(policy.id)]]),
    el("details.more", { open: this.#isRulesOpen, ontoggle: ({ target }) => { this.#isRulesOpen = target.open; } },
      el("summary", null, "Rules"), codeBlock("rules", JSON.stringify(policy.rules, null, 2)).node)));
  }

  /* At least the last week, with a bar for every day. */
  #showDays({ days }) {
    const spent = new Map(days.map((each) => [Date.parse(`${each.day}T00:00:00Z`) / 1000, Number(each.spent_usd)]));
    const today = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
    const first = Math.min(today - 6 * DAY_S, ...spent.keys());
    const times = Array.from({ length: (today - first) / DAY_S + 1 }, (_, at) => first + at * DAY_S);
    const sum = days.reduce((all, each) => all + Number(each.spent_usd), 0);
    this.#chart.node.hidden = !days.length;
    this.#chart.draw(times.map((time) => time + DAY_S / 2), [
      { label: "spent", colour: "series-2", values: times.map((time) => spent.get(time) ?? 0), bars: true, total: format.usd(sum) }],
    { unit: "USD", step: DAY_S });
  }

  #showSenders({ users, page, total }) {
    refreshChildren(this.#senders, users.length ? [table("Senders", [
      { name: "Sender", show: (user) => idText(user.sender) },
      { name: "Spent", kind: "num", show: (user) => format.usd(user.spent_usd) },
      { name: "Reserved", kind: "num", show: (user) => format.usd(user.reserved_usd) },
      { name: "Operations", kind: "num", show: (user) => format.number(user.operations) },
      { name: "Remaining", kind: "num", show: (user) => (user.left_usd === null ? "No limit" : format.usd(user.left_usd)) },
    ], users), pager({ page, total, limit: LIMIT }, (next) => {
      this.#page = next;
      this.load();
    })] : empty("No sponsored operations yet"));
  }

  async #showRefusals() {
    const { refusals } = await account.get(`${this.#path}/refusals${query({ limit: LIMIT })}`);
    refreshChildren(this.#refusals, card("Recent refusals", refusals.length ? table("Recent refusals", [
      { name: "Time", show: (each) => format.time(each.at) },
      { name: "Rule", show: (each) => el("code.nowrap", null, each.rule) },
      { name: "Sender", show: (each) => idText(each.sender) },
      { name: "Message", show: (each) => each.message },
    ], refusals) : empty("No refusals")));
  }

  #edit(policy) {
    dialog("Edit policy", (close) => {
      const name = forms.text("Name", { required: true, maxlength: "200", value: policy.name });
      const rules = rulesForm(policy.rules);
      return forms.form([name.node, rules.node], {
        label: "Save changes",
        labels: LABELS,
        cancel: close,
        send: async () => {
          const changes = rules.changes();
          await account.patch(this.#path, { name: name.read(), ...(Object.keys(changes).length && { rules: changes }) });
          close();
          toast("Policy updated");
          await this.load();
        },
      });
    });
  }

  #remove(policy) {
    confirm("Delete policy", `“${policy.name}” stops sponsoring operations. This cannot be undone.`, "Delete policy", async () => {
      await account.remove(this.#path);
      toast("Policy deleted");
      location.hash = "#/policies";
    });
  }
}
