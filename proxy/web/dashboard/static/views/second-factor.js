/* Two-factor sign-in: setting up an authenticator app, the recovery codes, and turning it off. */

import { account } from "../api.js";
import { el, qrCode } from "../dom.js";
import * as forms from "../forms.js";
import { badge, button, card, copyButton, dialog, secretDialog, secretField } from "../components.js";

const EXPLANATION = "Sign-in asks for a code from an authenticator app in addition to the password or link.";

/* `changed` is called when it was turned on or off. */
export function secondFactorCard(holder, changed) {
  if (holder.has_second_factor) {
    return card("Two-factor sign-in", el("p", null, badge("on", "good"), " ", EXPLANATION),
      el("div.actions", null, button("Turn off", () => turnOff(changed))));
  }
  return card("Two-factor sign-in", el("p", null, EXPLANATION),
    el("div.actions", null, button("Set up", () => begin(holder, changed))));
}

const codeField = (hint) => forms.text("Code", { autocomplete: "one-time-code", required: true, maxlength: "40", hint });

/* Asks for the password first, if there is one: a stolen session must not be able to lock the holder out. */
async function begin(holder, changed) {
  if (!holder.has_password) return setUp(await account.post("/second-factor", {}), changed);
  return dialog("Set up two-factor sign-in", (close) => {
    const current = forms.password("Password", { autocomplete: "current-password", required: true });
    return forms.form([current.node], {
      label: "Continue",
      cancel: close,
      send: async () => {
        const secret = await account.post("/second-factor", { current_password: current.read() });
        close();
        setUp(secret, changed);
      },
    });
  });
}

function setUp({ secret, qr_code: squares }, changed) {
  dialog("Set up two-factor sign-in", (close) => {
    const code = codeField("The six digits that the app shows now.");
    return [el("p", null, "Scan the code with your authenticator app, or type the secret into it."),
      qrCode(squares, "QR code for your authenticator app"), secretField(secret, "Secret"),
      forms.form([code.node], {
        label: "Turn on",
        cancel: close,
        send: async () => {
          const { recovery_codes: codes } = await account.post("/second-factor/confirm", { code: code.read() });
          close();
          showRecovery(codes, changed);
        },
      })];
  });
}

function showRecovery(codes, changed) {
  const node = secretDialog("Recovery codes", (close) => [
    el("p", null, "Two-factor sign-in is on. If you lose your phone, each of these codes signs you in once. They are not shown again: "
      + "save them in a safe place."),
    el("ul.codes", null, codes.map((code) => el("li", null, el("code", null, code.replace(/(.{4})(?!$)/g, "$1-"))))),
    el("div.actions", null, copyButton(codes.join("\n"), "Copy all"), button("I have saved them", close, { kind: "main" })),
  ]);
  node.addEventListener("close", changed);
}

function turnOff(changed) {
  dialog("Turn off two-factor sign-in", (close) => {
    const code = codeField("From your authenticator app, or one of your recovery codes.");
    return forms.form([code.node], {
      label: "Turn off",
      kind: "danger",
      cancel: close,
      send: async () => {
        await account.post("/second-factor/remove", { code: code.read() });
        close();
        changed();
      },
    });
  });
}
