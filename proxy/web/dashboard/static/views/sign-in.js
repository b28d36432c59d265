/* Sign-in panels: by password, by emailed link, with an admin token. */

import { account, admin, serviceOptions } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncRegion, button, card, note } from "../components.js";

const alternative = (label, next) => button(label, next, { kind: "link" });

/* Offered only where the service can send mails. */
function mailAlternative(label, open) {
  const node = alternative(label, () => open("email"));
  node.hidden = true;
  serviceOptions().then(({ mail }) => { node.hidden = !mail; }, () => {});
  return node;
}

export function show(main, { panel, token, onSignedIn, brand }) {
  const open = (name) => {
    setChildren(main, brand, card(null, PANELS[name]({ open, onSignedIn, token })));
    main.querySelector("input")?.focus();
  };
  open(panel);
}

/* The second factor. The field appears when the service asks for a code. */
function codeField() {
  const base = forms.text("Code", { autocomplete: "one-time-code", inputmode: "text", maxlength: "40",
    hint: "From your authenticator app, or one of your recovery codes." });
  base.node.hidden = true;
  const asking = async (send) => {
    try {
      await send();
    } catch (failure) {
      if (failure.details?.second_factor) {
        base.node.hidden = false;
        base.control.required = true;
        base.control.focus();
      }
      throw failure;
    }
  };
  return { ...base, asking, given: () => (base.read() ? { code: base.read() } : {}) };
}

function passwordPanel({ open, onSignedIn }) {
  const email = forms.text("Email", { type: "email", autocomplete: "username", required: true });
  const password = forms.password("Password", { autocomplete: "current-password", required: true });
  const code = codeField();
  return [el("h1", null, "Sign in"),
    forms.form([email.node, password.node, code.node], {
      label: "Sign in",
      send: async () => {
        await code.asking(() => account.signIn("/sign-in", { email: email.read(), password: password.read(), ...code.given() }));
        onSignedIn();
      },
    }),
    el("div.alternatives", null, mailAlternative("Email me a sign-in link", open),
      alternative("Sign in as an operator", () => open("operator")))];
}

function emailPanel({ open }) {
  const email = forms.text("Email", { type: "email", autocomplete: "username", required: true,
    hint: "Forgot your password? You can set a new one when you open the link." });
  const confirmation = el("div");
  return [el("h1", null, "Sign in by email"), confirmation,
    forms.form([email.node], {
      label: "Send link",
      send: async () => {
        await account.post("/sign-in/link", { email: email.read() });
        setChildren(confirmation, note(`If ${email.read()} has an account, we sent it a sign-in link. The link works once and expires in a few minutes.`, "good"));
      },
    }),
    el("div.alternatives", null, alternative("Use a password", () => open("account")))];
}

/* Opening the link does not redeem it; the button does. Mail scanners open links too. */
function linkPanel({ open, onSignedIn, token }) {
  const password = forms.password("New password (optional)", { autocomplete: "new-password", minlength: "12", maxlength: "200",
    hint: "At least 12 characters. Leave empty to keep your current password." });
  const code = codeField();
  return [el("h1", null, "Welcome back"), el("p", null, "This link signs you in once."),
    forms.form([password.node, code.node], {
      label: "Sign in",
      send: async () => {
        const given = { token, ...(password.read() ? { password: password.read() } : {}), ...code.given() };
        await code.asking(() => account.signIn("/sign-in/redeem", given));
        onSignedIn();
      },
    }),
    el("div.alternatives", null, mailAlternative("Request a new link", open))];
}

/* Like a sign-in link, the button redeems it. */
function confirmPanel({ token }) {
  const done = el("div");
  return [el("h1", null, "Confirm your email address"), done,
    forms.form([], {
      label: "Confirm",
      send: async () => {
        const { email } = await account.post("/email/confirm", { token });
        setChildren(done, note(`The email address of your account is now ${email}.`, "good"));
      },
    }),
    el("div.alternatives", null, alternative("Go to the dashboard", () => location.reload()))];
}

/* Shows what the invitation is for. Like a sign-in link, the button redeems it. */
function invitationPanel({ onSignedIn, token }) {
  const region = asyncRegion(async () => {
    const { account: name, email, role } = await account.post("/sign-in/invitation", { token });
    const user = forms.text("Email", { type: "email", autocomplete: "username", value: email, readonly: true });
    const password = forms.password("New password", { autocomplete: "new-password", required: true, minlength: "12", maxlength: "200",
      hint: "At least 12 characters." });
    return [el("p", null, `You are invited to the account ${name}, with the role ${role}. Choose a password to join.`),
      forms.form([user.node, password.node], {
        label: "Join",
        send: async () => {
          await account.signIn("/sign-in/invitation/accept", { token, password: password.read() });
          onSignedIn();
        },
      })];
  });
  region.ready.then(() => region.node.querySelector("[type=password]")?.focus());
  return [el("h1", null, "Join an account"), region.node];
}

function operatorPanel({ open, onSignedIn }) {
  const token = forms.password("Admin token", { autocomplete: "current-password", required: true, class: "mono",
    hint: "Create one on the server: penstock admin token create --name you" });
  return [el("h1", null, "Sign in as an operator"),
    forms.form([token.node], {
      label: "Sign in",
      send: async () => {
        await admin.signIn("/sign-in", { token: token.read().trim() });
        if (!location.hash.startsWith("#/operator")) history.replaceState(null, "", "#/operator");
        onSignedIn();
      },
    }),
    el("div.alternatives", null, alternative("Sign in to an account", () => open("account")))];
}

const PANELS = { account: passwordPanel, email: emailPanel, link: linkPanel, confirm: confirmPanel, invitation: invitationPanel, operator: operatorPanel };
