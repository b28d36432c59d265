/* One gas policy: its spending by day and by sender, its rules, and what it refused. */

import { account, contract, query } from "../api.js";
import { Chart } from "../chart.js";
import { el, renew } from "../dom.js";
import * as forms from "../forms.js";
import { badge, button, card, codeBlock, confirm, dialog, empty, facts, heading, note, pager, place, poll, table, toast, working } from "../components.js";
import * as format from "../format.js";
import { spentOf } from "./policies.js";
import { rulesForm } from "./rules.js";

const LIMIT = 20;
const REFUSALS = "account_list_gas_refusals";

export async function showOne(id) {
  const view = new One(id);
  await view.load();
  poll(view.node, 5, () => view.load());
  return view.node;
}

class One {
  #path;
  #head = el("div");
  #users = el("div");
  #refused = el("div");
  #page = 1;
  #isOpen = false;
  #chart = new Chart("Spent by day", { show: (value) => (value === null || value === undefined ? format.NONE : `$${format.compact(value)}`), together: "spend" });

  constructor(id) {
    this.#path = `/gas/policies/${encodeURIComponent(id)}`;
    this.node = el("div", null, el("a.crumb", { href: "#/policies" }, "← Gas policies"), this.#head, this.#chart.node,
      el("p"), card("Senders", this.#users), this.#refused);
  }

  async load() {
    const [policy, spend] = await Promise.all([
      account.get(this.#path), account.get(`${this.#path}/spend${query({ page: this.#page, limit: LIMIT })}`)]);
    this.#showHead(policy, spend);
    this.#showDays(spend);
    this.#showUsers(spend);
    await this.#showRefusals();
  }

  #showHead(policy, spend) {
    const isActive = policy.status === "active";
    const turn = working(isActive ? "Pause" : "Resume", async () => {
      await account.patch(this.#path, { status: isActive ? "paused" : "active" });
      toast(isActive ? "Nothing is sponsored until you resume it." : "The policy sponsors again.");
      await this.load();
    }, { kind: isActive ? "" : "main" });
    renew(this.#head, heading(policy.name, { actions: [turn, button("Edit limits", () => this.#edit(policy)),
      button("Delete", () => this.#remove(policy), { kind: "danger" })] }),
    !isActive && note("Paused: nothing is sponsored. What was sponsored before stays good.", "wait"),
    card(null, facts([["Status", badge(policy.status)], ["Chain", policy.network], ["Spent", spentOf(policy.rules, spend)],
      ["Operations", format.number(spend.operations)], ["Left", spend.left_usd === null ? "no cap" : format.usd(spend.left_usd)],
      ["Starts anew", spend.resets_at ? format.time(spend.resets_at) : "never"], ["Id", el("code", null, policy.id)]]),
    el("details.more", { open: this.#isOpen, ontoggle: ({ target }) => { this.#isOpen = target.open; } },
      el("summary", null, "Rules"), codeBlock("rules", JSON.stringify(policy.rules, null, 2)).node)));
  }

  #showDays({ days }) {
    const sorted = [...days].sort((one, other) => one.day.localeCompare(other.day));
    this.#chart.node.hidden = !sorted.length;
    const sum = sorted.reduce((all, each) => all + Number(each.spent_usd), 0);
    this.#chart.draw(sorted.map(({ day }) => Date.parse(`${day}T12:00:00Z`) / 1000), [
      { label: "spent", colour: "series-2", values: sorted.map((each) => Number(each.spent_usd)), bars: true, total: `$${format.compact(sum)}` }]);
  }

  #showUsers({ users, page, total }) {
    renew(this.#users, users.length ? [table("Senders", [
      { name: "Sender", show: (user) => el("code", null, user.sender) },
      { name: "Spent", kind: "num", show: (user) => format.usd(user.spent_usd) },
      { name: "Held", kind: "num", show: (user) => format.usd(user.reserved_usd) },
      { name: "Operations", kind: "num", show: (user) => format.number(user.operations) },
      { name: "Left", kind: "num", show: (user) => (user.left_usd === null ? "no cap" : format.usd(user.left_usd)) },
    ], users), pager({ page, total, limit: LIMIT }, (next) => {
      this.#page = next;
      this.load();
    })] : empty("Nobody was sponsored yet"));
  }

  /* Where the service keeps them. */
  async #showRefusals() {
    const document_ = await contract();
    const isThere = Object.values(document_.paths).some((path) => path.get?.operationId === REFUSALS);
    if (!isThere) return;
    const { refusals } = await account.get(`${this.#path}/refusals${query({ limit: LIMIT })}`);
    renew(this.#refused, card("Last refusals", refusals.length ? table("Last refusals", [
      { name: "When", show: (each) => format.time(each.at) },
      { name: "Rule", show: (each) => el("code", null, each.rule) },
      { name: "Sender", show: (each) => el("code", null, each.sender) },
      { name: "What was said", show: (each) => each.message },
    ], refusals) : empty("Nothing was refused")));
  }

  #edit(policy) {
    dialog("Edit policy", (close) => {
      const name = forms.text("Name", { required: true, maxlength: "200", value: policy.name });
      const rules = rulesForm(policy.rules);
      return forms.form([name.node, rules.node], {
        label: "Save",
        cancel: close,
        send: async () => {
          const changes = rules.changes();
          await account.patch(this.#path, { name: name.read(), ...(Object.keys(changes).length && { rules: changes }) });
          close();
          toast("Saved.");
          await this.load();
        },
      });
    });
  }

  #remove(policy) {
    confirm("Delete policy", `“${policy.name}” sponsors nothing from now on. This cannot be undone.`, "Delete", async () => {
      await account.remove(this.#path);
      toast("The policy is deleted.");
      location.hash = "#/policies";
    });
  }
}
