/*
 * Sends requests as one of the account's own keys without its text: the service makes a token that stands for the key for ten
 * minutes, together with the session's cookie.
 */

import { account } from "../api.js";

// Tokens are renewed this long before they end.
const EARLY_MS = 30e3;
const tokens = new Map();

/* {id: name} of the active keys, live ones first. Empty without an account, and for people who cannot manage its keys. */
export async function sessionKeys() {
  if (!account.can("manage")) return {};
  const { keys } = await account.get("/keys");
  const active = keys.filter(({ status }) => status === "active").sort((one, other) => one.mode.localeCompare(other.mode));
  return Object.fromEntries(active.map(({ id, name, mode }) => [id, `${name} (${mode})`]));
}

export async function tokenFor(id) {
  const kept = tokens.get(id);
  if (kept && Date.parse(kept.expires_at) - EARLY_MS > Date.now()) return kept.token;
  const made = await account.post(`/keys/${encodeURIComponent(id)}/sandbox`);
  tokens.set(id, made);
  return made.token;
}
