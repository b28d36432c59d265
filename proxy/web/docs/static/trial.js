/*
 * Sends a request of the reference as one of the signed-in account's keys. The page never has the key: the service makes a token
 * that stands for it for ten minutes, together with the session's cookie.
 */

import { el } from "./dom.js";

const ACCOUNT = "/v1/account";
// Tokens are renewed this long before they end.
const EARLY_MS = 30e3;
const MAX_SHOWN = 20000;
const tokens = new Map();
let csrf = "";

async function call(path, options = {}) {
  const reply = await fetch(ACCOUNT + path, { credentials: "same-origin", cache: "no-store", ...options });
  const data = await reply.json().catch(() => ({}));
  if (!reply.ok) throw Object.assign(new Error(data.error?.message ?? `status ${reply.status}`), { status: reply.status });
  return data;
}

async function tokenFor(key) {
  const kept = tokens.get(key);
  if (kept && Date.parse(kept.expires_at) - EARLY_MS > Date.now()) return kept.token;
  const made = await call(`/keys/${encodeURIComponent(key)}/sandbox`, { method: "POST", headers: { "X-CSRF-Token": csrf } });
  tokens.set(key, made);
  return made.token;
}

const field = (label, control) => el("label", null, el("span", null, label), control);
const sentence = (...parts) => [el("p.hint", { role: "status" }, parts)];

/* The form of a request, or a sentence that says what is missing. */
export async function trial(request) {
  let keys;
  try {
    ({ csrf_token: csrf } = await call("/session"));
    ({ keys } = await call("/keys"));
  } catch (failure) {
    if (failure.status === 401) return sentence(el("a", { href: "/dashboard" }, "Sign in to the dashboard"), " to send requests from here.");
    return sentence(failure.message);
  }
  // Live keys first: the examples may be of a live network.
  const usable = keys.filter(({ status }) => status === "active").sort((one, other) => one.mode.localeCompare(other.mode));
  if (!usable.length) return sentence(el("a", { href: "/dashboard#/keys" }, "Create an API key"), " to send requests from here.");
  return [form(request, usable)];
}

/* Why a key cannot send a request, if its lists of networks, methods or scopes say so. */
function refusalOf({ name, scopes, allowed_networks: networks, allowed_methods: methods }, { path, body, scope }) {
  const network = path.match(/^\/v1\/rpc\/([^/?]+\/[^/?]+)/)?.[1];
  const called = network && body.match(/"method"\s*:\s*"(\w+)"/)?.[1];
  if (scope && !scopes.includes(scope)) return `${name} lacks the scope ${scope}`;
  if (network && networks.length && !networks.includes(network)) return `${name} may not be used on ${network}`;
  if (called && methods.length && !methods.includes(called)) return `${name} may not call ${called}`;
  return "";
}

function form({ url, method, body, scope }, keys) {
  const key = el("select", null, keys.map(({ id, name, mode }) => el("option", { value: id }, `${name} (${mode})`)));
  const { origin, pathname, search } = new URL(url);
  const path = el("input", { type: "text", spellcheck: "false", autocomplete: "off" });
  path.value = pathname + search;
  const text = body === undefined ? null : el("textarea", { rows: "8", spellcheck: "false" });
  if (text) text.value = JSON.stringify(body, null, 2);
  const output = el("div", { "aria-live": "polite" });
  const submit = el("button.try", { type: "submit" }, "Send");
  const refusal = el("p.hint", { role: "status" });
  const node = el("form", { "aria-label": "Try it" }, field("Key", key), field(`${method} path`, path), text && field("Body", text), refusal, submit, output);
  const explain = () => {
    const reason = refusalOf(keys.find(({ id }) => id === key.value), { path: path.value, body: text?.value ?? "", scope });
    refusal.replaceChildren(...(reason ? [`${reason}: choose another key, or `, el("a", { href: "/dashboard#/keys" }, "change this one"), "."] : []));
  };
  const able = keys.find((each) => !refusalOf(each, { path: path.value, body: text?.value ?? "", scope }));
  if (able) key.value = able.id;
  node.addEventListener("input", explain);
  explain();
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      output.replaceChildren(...await send(key.value, origin + path.value, method, text?.value));
    } catch (failure) {
      output.replaceChildren(el("p.hint", null, failure.message));
    } finally {
      submit.disabled = false;
    }
  });
  return node;
}

async function send(key, url, method, body) {
  if (new URL(url).origin !== location.origin) throw new Error("The path must begin with a slash.");
  const headers = { "X-API-Key": await tokenFor(key), ...(body !== undefined && { "Content-Type": "application/json" }) };
  const began = performance.now();
  const reply = await fetch(url, { method, headers, body, credentials: "same-origin", cache: "no-store" });
  const text = (await reply.text()).slice(0, MAX_SHOWN);
  const units = reply.headers.get("X-Compute-Units");
  const facts = [`Status ${reply.status}`, `${Math.round(performance.now() - began)} ms`, units && `${units} compute units`];
  return [el("p.hint", null, facts.filter(Boolean).join(" · ")),
    el("pre", { tabindex: "0", role: "region", "aria-label": "Reply" }, el("code", null, indented(text)))];
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
