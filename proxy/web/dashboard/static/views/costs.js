/* What upstreams cost, for operators: by upstream, method and account, beside what accounts were charged. */

import { admin, query } from "../api.js";
import { bar, el } from "../dom.js";
import { asyncRegion, badge, button, card, codeBlock, dialog, empty, heading, methodName, poll, segmentedControl, table, tile, toast } from "../components.js";
import * as format from "../format.js";
import * as forms from "../forms.js";
import { linkTo } from "../location.js";

const REFRESH_S = 30;
const PERIODS = { 1: "Today", 7: "7 days", 30: "30 days" };
const LEAD = "Every attempt that was sent to a provider, at the provider's price. Own nodes cost nothing.";

export async function showForOperators() {
  let days = "30";
  const report = asyncRegion(async () => reportOf(await admin.get(`/costs${query({ days })}`), () => report.reload()));
  const choice = segmentedControl("Period", PERIODS, days, (next) => {
    days = next;
    report.reload();
  });
  await report.ready;
  const node = el("div", null, heading("Costs", { lead: LEAD, actions: choice }), report.node);
  poll(node, REFRESH_S, report.reload);
  return node;
}

function reportOf(found, load) {
  const { total, own, accounts, budgets } = found;
  const priced = accounts.filter(({ margin_usd: margin }) => margin !== null);
  return [
    el("div.tiles", null,
      tile("Cost", format.usd(total.cost_usd), format.counted(total.calls, "call")),
      tile("Own calls", format.usd(own.cost_usd), "polls and checks, for no account"),
      tile("Saved by the cache", format.usd(found.saved_usd), "estimated"),
      tile("Saved by shared calls", format.usd(found.saved_by_joins_usd), "equal calls under way, estimated"),
      tile("Margin", priced.length ? format.usd(sum(priced, "margin_usd")) : format.NONE, priced.length ? `of ${format.counted(priced.length, "account")}` : "set usage.unit_prices")),
    card("Budgets", budgets.length ? budgetsTable(budgets, load) : empty("No upstream has a budget", "Add one to its block in penstock.toml, and reload the settings. Its credits can then be changed here.",
      codeBlock("Budget of an upstream", BUDGET_LINE).node)),
    card("Accounts", accounts.length ? accountsTable(accounts) : empty("No account has cost anything in this period")),
    card("Upstreams", found.upstreams.length ? upstreamsTable(found.upstreams)
      : empty("No costs in this period", "Set cost or credits of an upstream, and its calls are counted here.")),
    found.methods.length > 0 && card("Methods", methodsTable(found.methods)),
  ];
}

const sum = (rows, name) => rows.reduce((whole, row) => whole + Number(row[name]), 0);
const most = (rows, name) => Math.max(1e-9, ...rows.map((row) => Number(row[name])));

const spentColumns = (rows) => [
  { name: "Calls", kind: "num", show: ({ calls }) => format.number(calls) },
  { name: "Credits", kind: "num", show: ({ credits }) => format.number(credits) },
  { name: "Cost", kind: "num", show: ({ cost_usd: cost }) => el("div", null, format.usd(cost), bar(Number(cost) / most(rows, "cost_usd"))) },
];

const accountsTable = (rows) => table("Accounts by cost", [
  { name: "Account", show: (each) => el("a", { href: linkTo("operator/usage", { account: each.account_id }) }, each.account_name || each.account_id) },
  { name: "Plan", show: ({ plan }) => plan || format.NONE },
  { name: "Requests", kind: "num", show: ({ requests }) => format.number(requests) },
  { name: "Units", kind: "num", show: ({ units }) => format.number(units) },
  ...spentColumns(rows),
  { name: "Revenue", kind: "num", show: ({ revenue_usd: revenue }) => format.usd(revenue) },
  { name: "Margin", kind: "num", show: ({ margin_usd: margin }) => (Number(margin) < 0 ? badge(format.usd(margin), "bad") : format.usd(margin)) },
], rows);

const upstreamsTable = (rows) => table("Upstreams by cost", [{ name: "Upstream", show: ({ upstream }) => upstream }, ...spentColumns(rows)], rows);

const methodsTable = (rows) => table("Methods by cost", [
  { name: "Method", show: ({ method, network }) => [methodName(method), el("span.below", null, network)] },
  ...spentColumns(rows),
  { name: "From the cache", kind: "num", show: ({ hits }) => format.number(hits) },
  { name: "Saved", kind: "num", show: ({ saved_usd: saved }) => format.usd(saved) },
  { name: "Shared", kind: "num", show: ({ joins }) => format.number(joins) },
  { name: "Saved by sharing", kind: "num", show: ({ saved_by_joins_usd: saved }) => format.usd(saved) },
], rows);

const BUDGET_LINE = 'budget = { credits = 300000000, per = "month", hard = true }';

const budgetsTable = (rows, load) => table("Budgets of upstreams", [
  { name: "Budget", show: ({ name, per, hard, set_by: by, set_at: at }) => [name, el("span.below", null, `${hard ? "Hard" : "Soft"}, per ${per}${by ? `, set by ${by} ${format.ago(at)}` : ""}`)] },
  { name: "Used", kind: "num", show: ({ used, credits }) => el("div", null, `${format.number(used)} of ${format.number(credits)}`, bar(Math.min(1, used / credits), used >= credits ? "bad" : "")) },
  { name: "Resets", show: ({ ends_at: end }) => format.ago(end) },
  { name: "Runs out", show: ({ runs_out_at: at, used, credits }) => (used >= credits ? badge("used up", "bad") : at ? badge(format.time(at), "wait") : "Not in this period") },
  { name: "", show: (each) => button("Change", () => changeBudget(each, load), { kind: "small", "aria-label": `Change the budget ${each.name}` }) },
], rows);

/* The period and whether the budget is hard are in the settings: they belong to the provider's plan. */
function changeBudget({ name, per, credits, settings_credits: usual }, load) {
  const field = forms.count(`Credits per ${per}`, { min: "1", value: String(credits), placeholder: String(usual), hint: `Leave empty for ${format.number(usual)}, as in penstock.toml. All hosts use the new limit within seconds.` });
  dialog(`Budget ${name}`, (close) => forms.form(field.node, {
    label: "Set budget",
    cancel: close,
    send: async () => {
      const found = await admin.post("/budgets", { name, credits: field.read() });
      close();
      toast(`${name} has ${format.counted(found.credits, "credit")} per ${per}`);
      await load();
    },
  }));
}
