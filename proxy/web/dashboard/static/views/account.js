/* Account settings: plan, limits, password, and deleting the account. */

import { account } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { card, facts, heading, toast } from "../components.js";
import * as format from "../format.js";

// Names of plan limits that are not clear by themselves.
const LABELS = { keys: "API keys", sample_every: "Good requests per record", policies: "Gas policies", sockets: "WebSockets", subscriptions: "Subscriptions per WebSocket" };

const limit = (value) => (value ? format.number(value) : "No limit");

export async function show() {
  const overview = await account.get("");
  return [heading("Account", { lead: overview.account.email }), planCard(overview), passwordCard(overview.account),
    deletionCard(overview.account)];
}

function planCard({ account: holder, limits, plan: figures }) {
  const others = Object.entries(figures).filter(([name]) => name !== "name" && !(name in limits));
  return card("Plan", facts([
    ["Plan", format.label(holder.plan)],
    ["Requests per second", limit(limits.requests_per_second)],
    ["Units per second", limit(limits.units_per_second)],
    ["Requests per day", limit(limits.requests_per_day)],
    ...others.map(([name, value]) => [LABELS[name] ?? format.label(name), typeof value === "number" ? limit(value) : String(value)]),
    ["Account ID", el("code", null, holder.id)],
    ["Created", format.date(holder.created_at)],
  ]));
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

function deletionCard(holder) {
  const email = forms.text("Email address", { type: "email", autocomplete: "off", required: true,
    hint: `Type ${holder.email} to confirm.` });
  return card("Delete account", el("p", null, "Your name, email address, API keys, webhooks and gas policies are deleted. Keys stop "
    + "working within a second. This cannot be undone."), forms.form(forms.row(email.node), {
    label: "Delete account",
    kind: "danger",
    send: async () => {
      await account.post("/delete", { email: email.read() });
      location.reload();
    },
  }));
}
