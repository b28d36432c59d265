/* Signing in: with a password, by a link in a mail, with the link that came, or as an operator. */

import { account, admin } from "../api.js";
import { el, put } from "../dom.js";
import * as forms from "../forms.js";
import { button, card, note } from "../components.js";

const other = (label, next) => button(label, next, { kind: "link" });

export function show(main, { kind, token, entered, brand }) {
  const open = (name) => {
    put(main, brand, card(null, PANELS[name]({ open, entered, token })));
    main.querySelector("input")?.focus();
  };
  open(kind);
}

function passwordPanel({ open, entered }) {
  const email = forms.text("E-mail", { type: "email", autocomplete: "username", required: true });
  const word = forms.password("Password", { autocomplete: "current-password", required: true });
  return [el("h1", null, "Sign in"),
    forms.form([email.node, word.node], {
      label: "Sign in",
      send: async () => {
        await account.enter("/sign-in", { email: email.read(), password: word.read() });
        entered();
      },
    }),
    el("div.other", null, other("Mail me a sign-in link", () => open("mail")), other("I am an operator", () => open("operator")))];
}

function mailPanel({ open }) {
  const email = forms.text("E-mail", { type: "email", autocomplete: "username", required: true,
    hint: "Also the way in when a password is forgotten: the link lets you set a new one." });
  const answer = el("div");
  return [el("h1", null, "Sign in by mail"), answer,
    forms.form([email.node], {
      label: "Send me a link",
      send: async () => {
        await account.post("/sign-in/link", { email: email.read() });
        put(answer, note(`If ${email.read()} has an account here, a link is on its way. It works once, for a few minutes.`, "good"));
      },
    }),
    el("div.other", null, other("Use a password", () => open("account")))];
}

/* The link is used when a person says so: programs that look into mails open links too. */
function linkPanel({ open, entered, token }) {
  const word = forms.password("New password (if you want one)", { autocomplete: "new-password", minlength: "12", maxlength: "200",
    hint: "At least 12 characters. Leave it empty to keep what you have." });
  return [el("h1", null, "Welcome back"), el("p", null, "Your link signs you in once, here and now."),
    forms.form([word.node], {
      label: "Sign in",
      send: async () => {
        await account.enter("/sign-in/redeem", { token, ...(word.read() ? { password: word.read() } : {}) });
        entered();
      },
    }),
    el("div.other", null, other("Ask for another link", () => open("mail")))];
}

function operatorPanel({ open, entered }) {
  const word = forms.password("Operator's token", { autocomplete: "current-password", required: true, class: "mono",
    hint: "Made on the machine: python -m proxy admin token create --name you" });
  return [el("h1", null, "Sign in as an operator"),
    forms.form([word.node], {
      label: "Sign in",
      send: async () => {
        await admin.enter("/sign-in", { token: word.read().trim() });
        if (!location.hash.startsWith("#/operator")) history.replaceState(null, "", "#/operator");
        entered();
      },
    }),
    el("div.other", null, other("Sign in to an account", () => open("account")))];
}

const PANELS = { account: passwordPanel, mail: mailPanel, link: linkPanel, operator: operatorPanel };
