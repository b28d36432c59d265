/* All accounts, for operators: plans, limits, sign-in links, and switching one off. */

import { admin, query } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { badge, button, card, dialog, empty, heading, pager, place, secret, table, toast, working } from "../components.js";
import * as format from "../format.js";

const LIMIT = 25;
const LIMITS = { requests_per_second: "Requests per second", units_per_second: "Units per second", requests_per_day: "Requests per day" };
const TYPING_MS = 250;

export async function showAccounts() {
  const wanted = { page: 1, search: "" };
  const { plans } = await admin.get("/plans");
  const list = place(async () => {
    const found = await admin.get(`/accounts${query({ ...wanted, limit: LIMIT })}`);
    return listOf(found, plans, list.again, (page) => {
      wanted.page = page;
      list.again();
    });
  });
  let timer = 0;
  const search = forms.text("Search", { type: "search", placeholder: "name, e-mail or id", oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      Object.assign(wanted, { search: search.read(), page: 1 });
      list.again();
    }, TYPING_MS);
  } });
  await list.ready;
  return [heading("Accounts", { actions: button("Create account", () => edit(null, plans, list.again), { kind: "main" }) }),
    card(null, search.node, list.node), card("Plans", plansOf(plans))];
}

function listOf({ accounts, page, total }, plans, again, go) {
  if (!accounts.length) return empty("No account is found");
  const rows = accounts.map((each) => ({ data: each, attributes: { class: each.disabled ? "dim" : undefined, "data-id": each.id } }));
  return [table("Accounts", [
    { name: "Name", show: (each) => [each.name, el("span.below", null, each.email)] },
    { name: "Plan", show: (each) => format.plain(each.plan) },
    { name: "Own limits", show: (each) => Object.entries(each.limits).filter(([, value]) => value !== null)
      .map(([name, value]) => `${LIMITS[name].toLowerCase()} ${value ? format.number(value) : "none"}`).join("; ") || format.NONE },
    { name: "Keys", kind: "num", show: (each) => format.number(each.active_keys) },
    { name: "Used today", kind: "num", show: (each) => format.number(each.used_today) },
    { name: "Since", show: (each) => format.date(each.created_at) },
    { name: "Status", show: (each) => badge(each.disabled ? "disabled" : "active") },
    { name: "Actions", kind: "do", show: (each) => actionsOf(each, plans, again) },
  ], rows), pager({ page, total, limit: LIMIT }, go)];
}

const actionsOf = (each, plans, again) => [
  button("Edit", () => edit(each, plans, again), { kind: "small", "aria-label": `Edit ${each.name}` }),
  button("Keys", () => keysOf(each), { kind: "small", "aria-label": `Keys of ${each.name}` }),
  working("Link", async () => {
    const made = await admin.post(`/accounts/${each.id}/link`);
    dialog("One-time link", () => [el("p", null, `Whoever opens it is signed in as ${each.name}, once, until ${format.hour(made.expires_at)}. Hand it to ${each.email} only.`),
      secret(made.url, "The link")]);
  }, { kind: "small", "aria-label": `Sign-in link for ${each.name}` }),
];

async function keysOf(each) {
  const { keys } = await admin.get(`/accounts/${each.id}/keys`);
  dialog(`Keys of ${each.name}`, () => (keys.length ? table("Keys", [
    { name: "Name", show: (key) => [key.name, el("code.below", null, key.hint)] },
    { name: "Networks", show: (key) => key.mode },
    { name: "Last used", show: (key) => format.ago(key.last_used_at) },
    { name: "Status", show: (key) => badge(key.status) },
  ], keys) : empty("No keys")));
}

function edit(each, plans, again) {
  dialog(each ? "Edit account" : "Create account", (close) => {
    const name = forms.text("Name", { required: true, maxlength: "200", value: each?.name });
    const email = forms.text("E-mail", { type: "email", required: true, value: each?.email });
    const plan = forms.select("Plan", Object.fromEntries(plans.map((one) => [one.name, format.plain(one.name)])), { value: each?.plan });
    const own = Object.entries(LIMITS).map(([key, label]) => ({ key, ...forms.count(label, { value: each?.limits[key] ?? "", placeholder: "the plan's" }) }));
    const off = forms.checks("State", { disabled: "Disabled: its keys are refused, nobody signs in" }, each?.disabled ? ["disabled"] : []);
    return forms.form([forms.row(name.node, email.node), plan.node, forms.row(...own.map(({ node }) => node)), each && off.node], {
      label: each ? "Save" : "Create account",
      cancel: close,
      send: async () => {
        const limits = own.map(({ key, read }) => [key, read()]);
        const said = { name: name.read(), email: email.read(), plan: plan.read() };
        if (each) await admin.patch(`/accounts/${each.id}`, { ...said, ...Object.fromEntries(limits), disabled: off.read().length > 0 });
        else await admin.post("/accounts", { ...said, ...Object.fromEntries(limits.filter(([, value]) => value !== null)) });
        close();
        toast(each ? "Saved." : "The account is there. Make it a link to sign in with.");
        await again();
      },
    });
  });
}

/* Figures below each other, plans beside each other. */
function plansOf(plans) {
  const names = Object.keys(plans[0] ?? {}).filter((name) => typeof plans[0][name] === "number");
  return table("Plans", [
    { name: "", show: (name) => format.plain(name) },
    ...plans.map((plan) => ({ name: format.plain(plan.name), kind: "num", show: (name) => (plan[name] ? format.number(plan[name]) : "no limit") })),
  ], names);
}
