/*
 * Sends requests as one of the account's own keys without its text: the service makes a token that stands for the key for ten
 * minutes, together with the session's cookie.
 */

import { account } from "../api.js";

// Tokens are renewed this long before they end.
const EARLY_MS = 30e3;
const tokens = new Map();

/* The active keys, live ones first. Empty without an account, and for people who cannot manage its keys. */
export async function sessionKeys() {
  if (!account.can("manage")) return [];
  const { keys } = await account.get("/keys");
  return keys.filter(({ status }) => status === "active").sort((one, other) => one.mode.localeCompare(other.mode));
}

const isIn = (list, value) => !list.length || list.includes(value);

/* Whether a key may be used on a network, may call a method, and may use an operation that needs this scope. */
export const mayUse = (key, network) => (key.mode === "live" || network.class === "test") && isIn(key.allowed_networks, network.network);
export const mayCall = (key, method) => isIn(key.allowed_methods, method);
export const mayRequest = (key, scope) => !scope || key.scopes.includes(scope);

/* The limits of a key on what it can be used for, as texts. */
export const usesOf = (key) => [
  key.allowed_networks.length > 0 && `only on ${key.allowed_networks.join(", ")}`,
  key.allowed_methods.length > 0 && `only ${key.allowed_methods.join(", ")}`,
  key.allowed_contracts.length > 0 && `only contracts ${key.allowed_contracts.join(", ")}`,
].filter(Boolean);

export async function tokenFor(id) {
  const kept = tokens.get(id);
  if (kept && Date.parse(kept.expires_at) - EARLY_MS > Date.now()) return kept.token;
  const made = await account.post(`/keys/${encodeURIComponent(id)}/sandbox`);
  tokens.set(id, made);
  return made.token;
}
