/* Settings, API keys: make, change, rotate, revoke. A key is shown once, in the answer that made it, and kept nowhere. */

import { account } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { networks } from "../networks.js";
import { badge, button, card, codeBlock, confirm, dialog, empty, heading, place, secret, table, toast, working } from "../components.js";
import * as format from "../format.js";

const SCOPES = {
  "rpc:read": "JSON-RPC, reading", "rpc:write": "JSON-RPC, sending transactions", "data:read": "Tokens and NFTs",
  "wallets:manage": "Smart wallets", "webhooks:manage": "Webhooks", "gas:manage": "Gas policies and sponsorship",
  "bundler:send": "The bundler",
};
const OVERLAPS = { 0: "at once", 3600: "after an hour", 86400: "after a day", 604800: "after a week" };

export async function show() {
  const list = place(async () => keysTable((await account.get("/keys")).keys, list.again));
  const make = button("Create key", () => edit(null, list.again), { kind: "main" });
  await list.ready;
  return [heading("API keys", { lead: "Programs show a key with every request. Keep keys on servers, out of pages and repositories.", actions: make }),
    card(null, list.node)];
}

function keysTable(keys, again) {
  if (!keys.length) return empty("No keys yet", "Create one, and you can make your first request.",
    button("Create key", () => edit(null, again), { kind: "main" }));
  const rows = keys.map((key) => ({ data: key, attributes: { class: key.status === "revoked" ? "dim" : undefined, "data-id": key.id } }));
  return table("API keys", columns(again), rows);
}

const columns = (again) => [
  { name: "Name", show: (key) => [key.name, el("code.below", null, key.hint)] },
  { name: "Networks", show: (key) => badge(key.mode, key.mode === "live" ? "live" : "off") },
  { name: "Scopes", show: scopesOf },
  { name: "Limits", show: limitsOf },
  { name: "Last used", show: (key) => el("span", { title: format.time(key.last_used_at) }, format.ago(key.last_used_at)) },
  { name: "Status", show: statusOf },
  { name: "Actions", kind: "do", show: (key) => actionsOf(key, again) },
];

function scopesOf(key) {
  if (key.scopes.length === Object.keys(SCOPES).length) return "all";
  return el("div.tags", null, key.scopes.map((scope) => el("code", null, scope)));
}

function limitsOf(key) {
  const said = [
    key.requests_per_second && `${format.number(key.requests_per_second)} requests/s`,
    key.units_per_second && `${format.number(key.units_per_second)} units/s`,
    key.allowed_ips.length > 0 && `from ${key.allowed_ips.join(", ")}`,
    key.allowed_origins.length > 0 && `origins ${key.allowed_origins.join(", ")}`,
  ].filter(Boolean);
  return said.length ? el("span", null, said.join("; ")) : "the plan's";
}

function statusOf(key) {
  const isOver = key.expires_at && new Date(key.expires_at) <= new Date();
  if (key.status === "active" && key.expires_at) {
    return isOver ? badge("expired") : el("div", null, badge("expiring"), el("span.below", null, `ends ${format.ago(key.expires_at)}`));
  }
  return badge(key.status);
}

function actionsOf(key, again) {
  if (key.status === "revoked") return null;
  const turn = key.status === "active" ? ["Disable", "disabled"] : ["Enable", "active"];
  return [
    button("Edit", () => edit(key, again), { kind: "small" }),
    button("Rotate", () => rotate(key, again), { kind: "small" }),
    working(turn[0], async () => {
      await account.patch(`/keys/${key.id}`, { status: turn[1] });
      await again();
    }, { kind: "small" }),
    button("Revoke", () => revoke(key, again), { kind: "small" }),
  ];
}

/* A new key, or an old one's name, scopes, limits and allow-lists. */
function edit(key, again) {
  dialog(key ? "Edit key" : "Create key", (close) => {
    const name = forms.text("Name", { required: true, maxlength: "100", value: key?.name, placeholder: "backend, production" });
    const mode = forms.select("Networks", { live: "Mainnets (svc_live_…)", test: "Testnets (svc_test_…)" });
    const scopes = forms.checks("May be used for", SCOPES, key?.scopes ?? Object.keys(SCOPES));
    const requests = forms.count("Requests per second", { value: key?.requests_per_second ?? "", min: "1", placeholder: "the account's" });
    const units = forms.count("Units per second", { value: key?.units_per_second ?? "", min: "1", placeholder: "the account's" });
    const ips = forms.lines("Only from these addresses", { rows: 2, value: key?.allowed_ips.join("\n"),
      hint: "IP addresses or blocks (203.0.113.0/24), one on each line. Empty: from anywhere." });
    const origins = forms.lines("Only from these origins", { rows: 2, value: key?.allowed_origins.join("\n"),
      hint: "Of web pages, such as https://app.example.com. Empty: any." });
    const limits = el("details.more", { open: Boolean(key) }, el("summary", null, "Limits and allow-lists"),
      forms.row(requests.node, units.node), forms.row(ips.node, origins.node));
    const send = async () => {
      const said = { name: name.read(), scopes: scopes.read(), allowed_ips: format.listed(ips.read()), allowed_origins: format.listed(origins.read()) };
      if (!said.scopes.length) throw new Error("Choose at least one thing that the key may be used for.");
      const own = { requests_per_second: requests.read(), units_per_second: units.read() };
      if (key) {
        await account.patch(`/keys/${key.id}`, { ...said, ...own });
        toast("Saved.");
      } else {
        const set = Object.fromEntries(Object.entries(own).filter(([, value]) => value !== null));
        await reveal(await account.post("/keys", { ...said, ...set, mode: mode.read() }), "Your new key");
      }
      close();
      await again();
    };
    return forms.form([forms.row(name.node, ...(key ? [] : [mode.node])), scopes.node, limits],
      { label: key ? "Save" : "Create key", send, cancel: close });
  });
}

function rotate(key, again) {
  dialog("Rotate key", (close) => {
    const overlap = forms.select("The old key ends", OVERLAPS, { value: "86400" });
    return [el("p", null, `A new key takes over from “${key.name}”, with the same scopes and limits. Both work until the old one ends.`),
      forms.form(overlap.node, {
        label: "Rotate",
        cancel: close,
        send: async () => {
          await reveal(await account.post(`/keys/${key.id}/rotate`, { overlap_s: Number(overlap.read()) }), "The key that takes over");
          close();
          await again();
        },
      })];
  });
}

const revoke = (key, again) => confirm("Revoke key",
  `“${key.name}” (${key.hint}) stops working everywhere within a second. This cannot be undone.`, "Revoke",
  async () => {
    await account.remove(`/keys/${key.id}`);
    toast("The key is revoked.");
    await again();
  });

/* The one time that a key is shown. */
async function reveal(made, title) {
  const fitting = (await networks()).find((each) => each.class === made.mode && each.family !== "svm");
  const call = '{"jsonrpc":"2.0","id":1,"method":"eth_blockNumber","params":[]}';
  const where = fitting?.network ?? (made.mode === "live" ? "ethereum/mainnet" : "ethereum/sepolia");
  const curl = `curl ${location.origin}/v1/rpc/${where} \\\n  -H 'X-API-Key: ${made.key}' \\\n  -H 'Content-Type: application/json' \\\n  -d '${call}'`;
  dialog(title, (close) => [
    el("p", null, "Copy it now: it is shown this once and stored nowhere."),
    secret(made.key, "The key"), codeBlock("Try it", curl).node,
    el("div.actions", null, button("I have it", close, { kind: "main" }))]);
}
