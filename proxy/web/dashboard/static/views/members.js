/* The people of an account: members with their roles, and invitations. Owners can change them. */

import { account } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, asyncRegion, badge, button, card, confirm, dialog, secretDialog, secretField, table, toast } from "../components.js";
import * as format from "../format.js";

export const ROLES = { owner: "Owner", developer: "Developer", "read-only": "Read-only", visitor: "Operator, read-only" };
const CHOICES = {
  developer: "Developer: manages keys, webhooks, alerts and gas policies",
  "read-only": "Read-only: sees everything except secrets",
  owner: "Owner: also manages members and the account",
};

export function membersCard() {
  const list = asyncRegion(async () => {
    const { members, invitations } = await account.get("/members");
    return [membersTable(members, list.reload), invitations.length > 0 && invitationsTable(invitations, list.reload),
      account.can("administer") && el("div.actions", null, button("Invite member", () => invite(list.reload)))];
  });
  return card("Members", el("p", null, "Each person signs in with their own email address and password."), list.node);
}

const membersTable = (members, reload) => table("Members", [
  { name: "Email", show: (each) => [each.email, each.id === account.session.person.id && [" ", badge("you", "good")]] },
  { name: "Role", show: (each) => [ROLES[each.role], each.is_first_owner && el("span.below", null, "First owner")] },
  { name: "Two-factor", show: (each) => (each.has_second_factor ? badge("on", "good") : badge("off")) },
  { name: "Joined", show: (each) => format.date(each.joined_at) },
  { name: "Last seen", show: (each) => (each.seen_at ? format.ago(each.seen_at) : format.NONE) },
  account.can("administer") && { name: "Actions", kind: "row-actions", show: (each) => (each.is_first_owner ? null : [
    button("Change role", () => changeRole(each, reload), { kind: "small", "aria-label": `Change the role of ${each.email}` }),
    button("Remove", () => remove(each, reload), { kind: "small.danger", "aria-label": `Remove ${each.email}` }),
  ]) },
], members);

const invitationsTable = (invitations, reload) => [el("h3", null, "Open invitations"), table("Open invitations", [
  { name: "Email", show: (each) => each.email },
  { name: "Role", show: (each) => ROLES[each.role] },
  { name: "Invited by", show: (each) => each.invited_by || format.NONE },
  { name: "Expires", show: (each) => format.time(each.expires_at) },
  account.can("administer") && { name: "Actions", kind: "row-actions", show: (each) => asyncButton("Revoke", async () => {
    await account.remove(`/invitations/${each.id}`);
    toast("Invitation revoked");
    await reload();
  }, { kind: "small", "aria-label": `Revoke the invitation of ${each.email}` }) },
], invitations)];

function invite(reload) {
  dialog("Invite member", (close) => {
    const email = forms.text("Email", { type: "email", required: true, maxlength: "200" });
    const role = forms.select("Role", CHOICES);
    return forms.form([email.node, role.node], {
      label: "Send invitation",
      cancel: close,
      send: async () => {
        const sent = await account.post("/invitations", { email: email.read(), role: role.read() });
        close();
        if (sent.url) showLink(sent);
        else toast(`We sent an invitation to ${sent.email}`);
        await reload();
      },
    });
  });
}

/* The service sends no mail. */
function showLink({ email, url, expires_at: until }) {
  secretDialog("Invitation", (close) => [
    el("p", null, `This service sends no mail. Send this link to ${email} yourself: it works once, until ${format.time(until)}. It is not shown again.`),
    secretField(url, "Invitation link"), el("div.actions", null, button("Done", close, { kind: "main" }))]);
}

function changeRole(member, reload) {
  dialog("Change role", (close) => {
    const role = forms.select("Role", CHOICES, { value: member.role });
    return [el("p", null, `The new role of ${member.email} applies at once.`), forms.form([role.node], {
      label: "Change role",
      cancel: close,
      send: async () => {
        await account.patch(`/members/${member.id}`, { role: role.read() });
        close();
        toast("Role changed");
        await reload();
      },
    })];
  });
}

const remove = (member, reload) => confirm("Remove member",
  `${member.email} is signed out at once and loses access. Keys and webhooks stay, also those that the member created.`, "Remove member",
  async () => {
    await account.remove(`/members/${member.id}`);
    toast("Member removed");
    await reload();
  });
