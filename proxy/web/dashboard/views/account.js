/* The account: plan and limits, and its password. */

import { account } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { card, facts, heading, toast } from "../components.js";
import * as format from "../format.js";

const most = (value) => (value ? format.number(value) : "no limit");

export async function show() {
  const said = await account.get("");
  return [heading("Account", { lead: said.account.email }), plan(said), password(said.account)];
}

function plan({ account: who, limits, plan: figures }) {
  const others = Object.entries(figures).filter(([name]) => name !== "name" && !(name in limits));
  return card("Plan", facts([
    ["Plan", format.plain(who.plan)],
    ["Requests per second, each key", most(limits.requests_per_second)],
    ["Units per second, each key", most(limits.units_per_second)],
    ["Requests per day", most(limits.requests_per_day)],
    ...others.map(([name, value]) => [format.plain(name), typeof value === "number" ? most(value) : String(value)]),
    ["Account", el("code", null, who.id)],
    ["Since", format.date(who.created_at)],
  ]));
}

function password(who) {
  const current = forms.password("Current password", { autocomplete: "current-password", required: true });
  const next = forms.password("New password", { autocomplete: "new-password", required: true, minlength: "12", maxlength: "200",
    hint: "At least 12 characters. You stay signed in here; everywhere else you are signed out." });
  const fields = who.has_password ? [current.node, next.node] : [next.node];
  return card(who.has_password ? "Change password" : "Set a password", forms.form(forms.row(...fields), {
    label: "Save password",
    send: async () => {
      const given = who.has_password ? { current_password: current.read() } : {};
      account.session = await account.put("/password", { ...given, new_password: next.read() });
      current.write("");
      next.write("");
      toast("The password is changed.");
    },
  }));
}
