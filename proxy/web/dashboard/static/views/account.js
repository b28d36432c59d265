/* Account settings: plan and usage, password, sessions, the log of changes, and deleting the account. */

import { account, query, serviceOptions } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, asyncRegion, badge, card, empty, facts, heading, idField, pager, table, toast } from "../components.js";
import * as format from "../format.js";
import { actionOf, actorOf } from "./actions.js";
import { membersCard } from "./members.js";
import { secondFactorCard } from "./second-factor.js";

const LIMIT = 25;

const limit = (value) => (value ? format.number(value) : "No limit");

const TABS = { "": "Plan", members: "Members", security: "Security", activity: "Activity", data: "Export and deletion" };

export async function show([tab = ""]) {
  // All sections begin to load in this turn, so they share one request.
  const loading = account.get("");
  const sections = {
    "": ({ overview }) => [accountCard(overview.account), planCard(overview)],
    members: () => members,
    security: ({ overview, mail }) => [passwordCard(overview.account), mail && emailCard(overview.account), factorRegion(overview.account), sessions],
    activity: () => actions,
    data: ({ overview }) => [exportCard(overview), deletionCard(overview.account)],
  };
  const allowed = { security: account.can("profile"), data: account.can("administer") };
  const tabs = Object.entries(TABS).filter(([name]) => allowed[name] ?? true);
  const chosen = tabs.some(([name]) => name === tab) ? tab : "";
  const members = chosen === "members" && membersCard();
  const sessions = chosen === "security" && sessionsCard();
  const actions = chosen === "activity" && actionsCard(loading);
  const [overview, { mail }] = await Promise.all([loading, serviceOptions()]);
  return [heading("Account", { lead: overview.account.email }),
    el("nav.tabs", { "aria-label": "Account" }, tabs.map(([name, text]) => el("a", { href: `#/account${name && `/${name}`}`, "aria-current": name === chosen ? "page" : undefined }, text))),
    sections[chosen]({ overview, mail })].flat();
}

const accountCard = (holder) => card("Details", facts([
  ["Name", holder.name],
  ["Account ID", idField(holder.id)],
  ["Created", format.date(holder.created_at)],
]));

/* Each limit with what is used of it, beside the other plans. */
function planCard({ account: holder, limits, today, used, plans }) {
  const spent = { ...used, requests_per_day: today.used };
  const own = (name, figures) => limits[name] ?? figures[name];
  const names = Object.keys(plans[0]).filter((name) => name !== "name");
  const columns = plans.map((plan) => ({
    name: plan.name === holder.plan ? `${format.label(plan.name)} (yours)` : format.label(plan.name),
    kind: plan.name === holder.plan ? "num.own" : "num",
    show: (name) => limit(plan.name === holder.plan ? own(name, plan) : plan[name]),
  }));
  return card("Plan and limits", table("Limits by plan", [
    { name: "Limit", show: format.limitName },
    { name: "Used", kind: "num", show: (name) => (spent[name] === undefined ? format.NONE : format.number(spent[name])) },
    ...columns,
  ], names), el("p.hint", null, "Daily limits reset at midnight UTC. Test events count as events and deliveries."));
}

function passwordCard(holder) {
  const current = forms.password("Current password", { autocomplete: "current-password", required: true });
  const next = forms.password("New password", { autocomplete: "new-password", required: true, minlength: "12", maxlength: "200",
    hint: "At least 12 characters. Changing it signs you out of all other sessions." });
  const fields = holder.has_password ? [current.node, next.node] : [next.node];
  return card(holder.has_password ? "Change password" : "Set a password", forms.form(forms.row(...fields), {
    label: "Save password",
    send: async () => {
      const proof = holder.has_password ? { current_password: current.read() } : {};
      account.session = await account.put("/password", { ...proof, new_password: next.read() });
      current.write("");
      next.write("");
      toast("Password updated");
    },
  }));
}

function emailCard(holder) {
  const email = forms.text("New email address", { type: "email", autocomplete: "email", required: true, maxlength: "200",
    hint: "We send a link to it. The address changes when you open the link." });
  const current = forms.password("Password", { autocomplete: "current-password", required: true });
  return card("Change email address", forms.form(forms.row(email.node, holder.has_password && current.node), {
    label: "Send link",
    send: async () => {
      const proof = holder.has_password ? { current_password: current.read() } : {};
      await account.post("/email", { ...proof, email: email.read() });
      toast(`We sent a link to ${email.read()}`);
      email.write("");
      current.write("");
    },
  }));
}

function factorRegion(holder) {
  const node = el("div", null, secondFactorCard(holder, async () => {
    setChildren(node, factorRegion((await account.get("")).account));
  }));
  return node;
}

/* "Chrome on Linux" from a User-Agent header. Chrome names Safari too, and Edge names Chrome: the first match counts. */
const BROWSERS = ["Edg", "OPR", "Firefox", "Chrome", "Safari"];
const SYSTEMS = ["Android", "iPhone", "iPad", "Windows", "Mac OS", "Linux"];
const BROWSER_NAMES = { Edg: "Edge", OPR: "Opera", "Mac OS": "macOS" };

function browserOf(agent) {
  const [browser, system] = [BROWSERS, SYSTEMS].map((names) => names.find((name) => agent.includes(name)));
  if (!browser) return agent.split(/[ /]/, 1)[0] || "Unknown";
  return [BROWSER_NAMES[browser] ?? browser, system && `on ${BROWSER_NAMES[system] ?? system}`].filter(Boolean).join(" ");
}

function sessionsCard() {
  const list = asyncRegion(async () => {
    const { sessions } = await account.get("/sessions");
    const end = (each) => asyncButton("Sign out", async () => {
      await account.remove(`/sessions/${each.id}`);
      await list.reload();
    }, { kind: "small" });
    const others = asyncButton("Sign out everywhere else", async () => {
      await account.remove("/sessions");
      await list.reload();
      toast("Signed out everywhere else");
    });
    return [table("Sessions", [
      { name: "Browser", show: (each) => [el("span", { title: each.agent }, browserOf(each.agent)), each.current && [" ", badge("this session", "good")]] },
      { name: "Address", show: (each) => el("code", null, each.address || format.NONE) },
      { name: "Signed in", show: (each) => format.time(each.created_at) },
      { name: "Last used", show: (each) => format.ago(each.seen_at) },
      { name: "Actions", kind: "row-actions", show: (each) => (each.current ? null : end(each)) },
    ], sessions), sessions.length > 1 && el("div.actions", null, others)];
  });
  return card("Sessions", list.node);
}

/* "You" for the reader, and the holder's address for older records of the first owner, which have none. */
function whoOf({ by, name }, holder) {
  if (by === "holder" && (name || holder.email) === account.session.person.email) return "You";
  return actorOf({ by, name: name || (by === "holder" ? holder.email : "") });
}

/* `overview`: the promise of the account. */
function actionsCard(overview) {
  let page = 1;
  const list = asyncRegion(async () => {
    const [{ actions, total }, { account: holder }] = await Promise.all([account.get(`/actions${query({ page, limit: LIMIT })}`), overview]);
    if (!actions.length) return empty("Nothing yet", "Sign-ins and changes to keys, webhooks and policies appear here.");
    const go = (next) => {
      page = next;
      list.reload();
    };
    return [table("Activity", [
      { name: "Time", show: (each) => format.time(each.at) },
      { name: "By", show: (each) => whoOf(each, holder) },
      { name: "Action", show: actionOf },
      { name: "Address", show: (each) => el("code", null, each.address || format.NONE) },
    ], actions), pager({ page, total, limit: LIMIT }, go)];
  });
  return card("Activity", list.node);
}

/* All pages of a list. */
async function allOf(path, name) {
  const found = [];
  for (let page = 1; ; page += 1) {
    const reply = await account.get(`${path}${query({ page, limit: 100 })}`);
    found.push(...reply[name]);
    if (!reply[name].length || found.length >= reply.total) return found;
  }
}

const USAGE_DAYS = 90;

/* One JSON file with everything that the account's own API returns. Secrets are not part of it. */
async function exported({ account: holder, limits }) {
  const from = new Date(Date.now() - USAGE_DAYS * 86400e3).toISOString();
  const [{ keys }, webhooks, policies, { sessions }, actions, usage] = await Promise.all([
    account.get("/keys"), allOf("/webhooks", "webhooks"), allOf("/gas/policies", "policies"), account.get("/sessions"),
    allOf("/actions", "actions"), account.get(`/usage${query({ step: "day", from })}`),
  ]);
  return { exported_at: new Date().toISOString(), account: holder, limits, keys, webhooks, policies, sessions, actions, usage };
}

function exportCard(overview) {
  const save = asyncButton("Export", async () => {
    const text = JSON.stringify(await exported(overview), null, 2);
    const link = el("a", { download: `penstock-${overview.account.id}.json` });
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.click();
    URL.revokeObjectURL(link.href);
  });
  return card("Export", el("p", null, `A JSON file with your account, keys, webhooks, gas policies, sessions, activity and the usage of ${USAGE_DAYS} days. `
    + "It contains no secrets."), el("div.actions", null, save));
}

function deletionCard(holder) {
  const email = forms.text("Email address", { type: "email", autocomplete: "off", required: true,
    hint: `Type ${holder.email} to confirm.` });
  const current = forms.password("Password", { autocomplete: "current-password", required: true });
  const code = forms.text("Code", { autocomplete: "one-time-code", required: true, maxlength: "40",
    hint: "From your authenticator app, or a recovery code." });
  return card("Delete account", el("p", null, "Your name, email address, API keys, webhooks and gas policies are deleted. Keys stop "
    + "working within a second. This cannot be undone."), forms.form(forms.row(email.node, holder.has_password && current.node,
    holder.has_second_factor && code.node), {
    label: "Delete account",
    kind: "danger",
    send: async () => {
      const proof = { ...holder.has_password && { current_password: current.read() }, ...holder.has_second_factor && { code: code.read() } };
      await account.post("/delete", { ...proof, email: email.read() });
      dispatchEvent(new CustomEvent("signed-out", { detail: { notice: "deleted" } }));
    },
  }));
}
