/* Entries of the log of actions: who did what, and what it changed. For the activity of an account, and for operators. */

import { el } from "../dom.js";
import { idText } from "../components.js";
import * as format from "../format.js";

const ACTORS = { holder: "Account holder", key: "API key", operator: "Operator" };
// Operations whose ids do not read as what happened.
const ACTIONS = {
  account_sign_in: "Signed in with a password", account_redeem_link: "Signed in by link", account_sign_out: "Signed out",
  account_set_password: "Changed the password", change_email: "Requested a new email address",
  confirm_email: "Changed the email address", begin_second_factor: "Started to set up two-factor sign-in",
  confirm_second_factor: "Turned two-factor sign-in on", remove_second_factor: "Turned two-factor sign-in off", update_own_account: "Changed the settings",
  end_session: "Ended a session", end_other_sessions: "Signed out everywhere else",
  account_update_alerts: "Changed the alerts", update_alerts: "Changed the alerts", account_test_alerts: "Sent a test alert",
  admin_create_account: "Created the account", admin_update_account: "Changed the account", admin_delete_account: "Deleted an account",
  delete_account: "Deleted an account", admin_make_link: "Created a sign-in link", admin_visit_account: "Looked at the account",
  account_accept_invitation: "Joined the account", update_member: "Changed a role",
  admin_sign_in: "Signed in as operator", admin_sign_out: "Signed out as operator",
  admin_cordon: "Cordoned an upstream", admin_uncordon: "Uncordoned an upstream",
  admin_promote: "Promoted an upstream", admin_withdraw: "Withdrew an upstream", admin_set_budget: "Set the budget of an upstream", canary_step: "Changed the share of an upstream",
  start_capture: "Captured calls",
  admin_create_announcement: "Announced", admin_delete_announcement: "Deleted an announcement",
  admin_token_create: "Created an operator token", admin_token_revoke: "Revoked an operator token",
};
const PAST = { create: "Created", update: "Changed", revoke: "Revoked", rotate: "Rotated", delete: "Deleted", resume: "Resumed", redeliver: "Redelivered", test: "Tested", invite: "Invited", remove: "Removed" };
// Members shown of a new or deleted object; the title has all.
const FEW = 3;

export function actionName(id) {
  if (ACTIONS[id]) return ACTIONS[id];
  const [verb, ...rest] = id.replace(/^account_/, "").split("_");
  return PAST[verb] ? `${PAST[verb]} ${rest.join(" ")}` : format.label(id);
}

/* The kind of actor with its name below. Older records of the first owner have no name. */
export const actorOf = ({ by, name }) => (by === "holder" ? name || ACTORS.holder : [ACTORS[by], name && el("span.below", null, name)]);

/* The action, its subject and what it changed. */
export const actionOf = (each) => [actionName(each.action), each.subject && el("span.below", null, each.subject.includes("@") ? each.subject : idText(each.subject)), changesOf(each)];

const shown = (value) => (value === null || value === "" ? "none" : Array.isArray(value) ? value.join(", ") || "none" : String(value));

function changesOf({ before, after }) {
  if (!before && !after) return null;
  const isChanged = Boolean(before && after);
  const names = Object.keys(after ?? before);
  const text = (name) => (isChanged ? `${format.label(name)}: ${shown(before[name])} → ${shown(after[name])}` : `${format.label(name)}: ${shown((after ?? before)[name])}`);
  const few = isChanged ? names : names.filter((name) => name !== "id" && (after ?? before)[name] !== null).slice(0, FEW);
  return el("span.below", { title: names.map(text).join("\n") }, few.map((name) => format.beginning(text(name), 120)).join("; "), few.length < names.length && " …");
}
