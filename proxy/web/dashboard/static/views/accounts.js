/* All accounts, for operators: plans, limits, sign-in links, disabling an account. */

import { admin, query } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, asyncRegion, badge, button, card, dialog, empty, heading, pager, secretDialog, secretField, table, toast } from "../components.js";
import * as format from "../format.js";

const LIMIT = 25;
const LIMITS = { requests_per_second: "Requests per second", units_per_second: "Units per second", requests_per_day: "Requests per day" };
// Wait for a pause in typing before searching.
const DEBOUNCE_MS = 250;

let loading = null;

/* The plans, loaded once. */
function allPlans() {
  loading ??= admin.get("/plans").then(({ plans }) => plans).catch((failure) => {
    loading = null;
    throw failure;
  });
  return loading;
}

export async function showForOperators() {
  const filters = { page: 1, search: "" };
  const list = asyncRegion(async () => {
    const [found, plans] = await Promise.all([admin.get(`/accounts${query({ ...filters, limit: LIMIT })}`), allPlans()]);
    return accountsTable(found, plans, list.reload, (page) => {
      filters.page = page;
      list.reload();
    });
  });
  let timer = 0;
  const search = forms.text("Search", { type: "search", placeholder: "Name, email, ID, key (ID, first or last characters) or request ID", oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      Object.assign(filters, { search: search.read(), page: 1 });
      list.reload();
    }, DEBOUNCE_MS);
  } });
  const plans = asyncRegion(async () => plansTable(await allPlans()));
  await Promise.all([list.ready, plans.ready]);
  const create = asyncButton("Create account", async () => edit(null, await allPlans(), list.reload), { kind: "main" });
  return [heading("Accounts", { actions: create }), card(null, search.node, list.node), card("Plans", plans.node)];
}

function accountsTable({ accounts, page, total }, plans, reload, go) {
  if (!accounts.length) return empty("No accounts found");
  const rows = accounts.map((each) => ({ data: each, attributes: { class: each.disabled ? "dim" : undefined, "data-id": each.id } }));
  return [table("Accounts", [
    { name: "Name", show: (each) => [each.name, el("span.below", null, each.email)] },
    { name: "Plan", show: (each) => [format.label(each.plan), customLimits(each).map((text) => el("span.below", null, text))] },
    { name: "Keys", kind: "num", show: (each) => format.number(each.active_keys) },
    { name: "Requests today", kind: "num", show: (each) => format.number(each.used_today) },
    { name: "Status", show: (each) => [badge(each.disabled ? "disabled" : "active"), el("span.below", null, `Since ${format.date(each.created_at)}`)] },
    { name: "Actions", kind: "row-actions", show: (each) => actionsOf(each, plans, reload) },
  ], rows), pager({ page, total, limit: LIMIT }, go)];
}

const customLimits = ({ limits }) => Object.entries(limits).filter(([, value]) => value !== null)
  .map(([name, value]) => `${LIMITS[name]}: ${value ? format.number(value) : "no limit"}`);

const actionsOf = (each, plans, reload) => [
  button("Edit", () => edit(each, plans, reload), { kind: "small", "aria-label": `Edit ${each.name}` }),
  button("Keys", () => showKeys(each), { kind: "small", "aria-label": `Keys of ${each.name}` }),
  asyncButton("Sign-in link", async () => {
    const link = await admin.post(`/accounts/${each.id}/link`);
    secretDialog("Sign-in link", (close) => [
      el("p", null, `Anyone with this link can sign in as ${each.name}. It works once and expires at ${format.clockTime(link.expires_at)}. Send it only to ${each.email}.`),
      secretField(link.url, "Sign-in link"), el("div.actions", null, button("Done", close, { kind: "main" }))]);
  }, { kind: "small", "aria-label": `Sign-in link for ${each.name}` }),
  !each.disabled && button("View", () => visit(each), { kind: "small", "aria-label": `View the account of ${each.name}` }),
];

/* Opens the account's dashboard without the right to change anything. */
function visit(each) {
  dialog("View account", (close) => [
    el("p", null, `You see the dashboard of ${each.name} for 30 minutes and cannot change anything. The account's activity has a record of it. `
      + "If this browser is signed in to an account, the visit replaces that session."),
    forms.form([], {
      label: "View account",
      cancel: close,
      send: async () => {
        await admin.post(`/accounts/${each.id}/visit`);
        history.replaceState(null, "", "#/overview");
        // Reloading clears what modules keep in memory about another account.
        location.reload();
      },
    })]);
}

async function showKeys(each) {
  const { keys } = await admin.get(`/accounts/${each.id}/keys`);
  dialog(`Keys of ${each.name}`, () => (keys.length ? table("API keys", [
    { name: "Name", show: (key) => [key.name, el("code.below", null, key.hint)] },
    { name: "Mode", show: (key) => format.label(key.mode) },
    { name: "Last used", show: (key) => format.ago(key.last_used_at) },
    { name: "Status", show: (key) => badge(key.status) },
  ], keys) : empty("No API keys")));
}

function edit(each, plans, reload) {
  dialog(each ? "Edit account" : "Create account", (close) => {
    const name = forms.text("Name", { required: true, maxlength: "200", value: each?.name });
    const email = forms.text("Email", { type: "email", required: true, value: each?.email });
    const plan = forms.select("Plan", Object.fromEntries(plans.map((one) => [one.name, format.label(one.name)])), { value: each?.plan });
    const overrides = Object.entries(LIMITS).map(([key, label]) => ({ key, ...forms.count(label, { value: each?.limits[key] ?? "", placeholder: "Plan limit" }) }));
    const disabled = forms.checks("Access", { disabled: "Disable this account: reject its API keys and block sign-in" }, each?.disabled ? ["disabled"] : []);
    return forms.form([forms.row(name.node, email.node), plan.node, forms.row(...overrides.map(({ node }) => node)), each && disabled.node], {
      label: each ? "Save changes" : "Create account",
      labels: LIMITS,
      cancel: close,
      send: async () => {
        const limits = overrides.map(({ key, read }) => [key, read()]);
        const values = { name: name.read(), email: email.read(), plan: plan.read() };
        if (each) await admin.patch(`/accounts/${each.id}`, { ...values, ...Object.fromEntries(limits), disabled: disabled.read().length > 0 });
        else await admin.post("/accounts", { ...values, ...Object.fromEntries(limits.filter(([, value]) => value !== null)) });
        close();
        toast(each ? "Account updated" : "Account created. Send its owner a sign-in link.");
        await reload();
      },
    });
  });
}

/* One row per limit, one column per plan. */
function plansTable(plans) {
  const names = Object.keys(plans[0] ?? {}).filter((name) => typeof plans[0][name] === "number");
  return table("Plans", [
    { name: "Limit", show: format.limitName },
    ...plans.map((plan) => ({ name: format.label(plan.name), kind: "num", show: (name) => (plan[name] ? format.number(plan[name]) : "No limit") })),
  ], names);
}
