/* API keys: create, edit, rotate, revoke. A key is shown once, from the reply that created it, and not kept. */

import { account } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { networks } from "../networks.js";
import { asyncButton, asyncRegion, badge, button, card, codeBlock, confirm, dialog, empty, heading, pager, secretDialog, secretField, table, toast } from "../components.js";
import * as format from "../format.js";
import { localTime } from "../ranges.js";
import { usesOf } from "./session-keys.js";

const SCOPES = {
  "rpc:read": "JSON-RPC reads", "rpc:write": "JSON-RPC transactions", "data:read": "Tokens and NFTs",
  "wallets:manage": "Smart wallets", "webhooks:manage": "Webhooks", "gas:manage": "Gas policies and sponsorship",
  "bundler:send": "Bundler", "requests:read": "Requests of the whole account",
};
/* What a key may do in the account itself, with the permission that a person needs to allow it. */
const ACCOUNT_SCOPES = {
  "usage:read": ["Plan and usage", "view"], "activity:read": ["Activity", "view"], "keys:manage": ["API keys, with at most its own rights", "manage"],
  "members:manage": ["Members, except owners", "administer"], "account:manage": ["Settings of the account", "administer"],
};
/* What requests with the key may ask for. An operator grants X-Upstream and X-Cost. */
const DIRECTIVES = { timeout_ms: "Deadline (X-Timeout-Ms)", max_stale: "Older replies (X-Max-Stale)", retry: "Fewer retries (X-Retry)",
  min_block: "Least block (X-Min-Block)", min_block_wait: "Wait for the block (X-Min-Block-Wait)", explain: "Record the request (X-Explain)", max_cost: "Cheap upstreams only (X-Max-Cost)", meta: "Details in socket replies (X-Meta)",
  verify: "Verified replies (X-Verify)", private: "Private transactions (X-Private)", private_fallback: "Public after some blocks (X-Private-Fallback)", fault: "Faults, for test keys (X-Fault)" };
/* What a web page needs to show balances and contracts, and to send transactions that its visitor has signed. */
const PUBLIC_PAGE = {
  scopes: ["rpc:read", "rpc:write"],
  methods: ["eth_chainId", "net_version", "eth_blockNumber", "eth_getBlockByNumber", "eth_call", "eth_estimateGas", "eth_gasPrice", "eth_maxPriorityFeePerGas", "eth_feeHistory",
    "eth_getBalance", "eth_getCode", "eth_getTransactionCount", "eth_getTransactionByHash", "eth_getTransactionReceipt", "eth_sendRawTransaction"],
};
const OVERLAPS = { 0: "Now", 3600: "In 1 hour", 86400: "In 24 hours", 604800: "In 7 days" };

const LIMIT = 25;

export async function show() {
  const filters = { page: 1, search: "" };
  const list = asyncRegion(async () => keysPage((await account.get("/keys")).keys, filters, list.reload));
  const search = forms.text("Search", { type: "search", placeholder: "Name or last characters", oninput: () => {
    Object.assign(filters, { search: search.read().trim().toLowerCase(), page: 1 });
    list.reload();
  } });
  const create = account.can("manage") && button("Create key", () => edit(null, list.reload), { kind: "main" });
  await list.ready;
  return [heading("API keys", { lead: "Send a key with every request. Keep keys on your servers, out of web pages and repositories.", actions: create }),
    card(null, search.node, list.node)];
}

/* One page of the keys that match. */
function keysPage(keys, filters, reload) {
  const matching = keys.filter((key) => `${key.name} ${key.hint} ${key.id}`.toLowerCase().includes(filters.search));
  if (keys.length && !matching.length) return empty("No keys found");
  const from = LIMIT * (filters.page - 1);
  return [keysTable(matching.slice(from, from + LIMIT), reload), matching.length > LIMIT && pager({ page: filters.page, total: matching.length, limit: LIMIT }, (page) => {
    filters.page = page;
    reload();
  })];
}

function keysTable(keys, reload) {
  if (!keys.length) return empty("No API keys yet", "Create a key to make your first request.",
    account.can("manage") && button("Create key", () => edit(null, reload), { kind: "main" }));
  const rows = keys.map((key) => ({ data: key, attributes: { class: key.status === "revoked" ? "dim" : undefined, "data-id": key.id } }));
  return table("API keys", columns(reload), rows);
}

const columns = (reload) => [
  { name: "Name", show: (key) => [key.name, el("code.below.nowrap", null, key.hint), (key.owner || key.note) && el("span.below", null, [key.owner, key.note].filter(Boolean).join(" · "))] },
  { name: "Mode", show: (key) => badge(key.mode, key.mode === "live" ? "live" : "off") },
  { name: "Scopes", show: scopesOf },
  { name: "Limits", show: limitsOf },
  { name: "Last used", show: (key) => el("span", { title: format.time(key.last_used_at) }, format.ago(key.last_used_at)) },
  { name: "Status", show: statusOf },
  account.can("manage") && { name: "Actions", kind: "row-actions", show: (key) => actionsOf(key, reload) },
];

function scopesOf(key) {
  const hasAll = Object.keys(SCOPES).every((scope) => key.scopes.includes(scope));
  const named = hasAll ? key.scopes.filter((scope) => scope in ACCOUNT_SCOPES) : key.scopes;
  return [hasAll && (named.length ? "All, and " : "All"), named.length > 0 && el("div.tags", null, named.map((scope) => el("code", null, scope)))];
}

function limitsOf(key) {
  const limits = [
    key.requests_per_second && `${format.number(key.requests_per_second)} requests/s`,
    key.units_per_second && `${format.number(key.units_per_second)} units/s`,
    ...usesOf(key),
    key.allowed_ips.length > 0 && `IPs ${key.allowed_ips.join(", ")}`,
    key.allowed_origins.length > 0 && `origins ${key.allowed_origins.join(", ")}`,
    key.allow_in_url && "allowed in URLs",
    key.private_transactions && "private transactions",
  ].filter(Boolean);
  return limits.length ? el("span", null, format.sentence(limits.join("; "))) : "Account limits";
}

function statusOf(key) {
  const isExpired = key.expires_at && new Date(key.expires_at) <= new Date();
  if (key.status === "active" && key.expires_at) {
    return isExpired ? badge("expired") : el("div", null, badge("expiring"), el("span.below", null, `Expires ${format.ago(key.expires_at)}`));
  }
  return badge(key.status);
}

function actionsOf(key, reload) {
  if (key.status === "revoked") return null;
  const [label, next] = key.status === "active" ? ["Disable", "disabled"] : ["Enable", "active"];
  return [
    button("Edit", () => edit(key, reload), { kind: "small" }),
    button("Rotate", () => rotate(key, reload), { kind: "small" }),
    next === "disabled" ? button(label, () => disable(key, reload), { kind: "small" }) : asyncButton(label, () => setStatus(key, next, reload), { kind: "small" }),
    el("span.apart", null, button("Revoke", () => revoke(key, reload), { kind: "small.danger" })),
  ];
}

const LABELS = { allowed_ips: "Allowed IP addresses", allowed_networks: "Networks", allowed_methods: "Methods", allowed_contracts: "Contracts", expires_at: "Expires", fault: "Faults" };

/* Creates a key, or edits the name, scopes, limits and restrictions of an existing one. */
function edit(key, reload) {
  dialog(key ? "Edit key" : "Create key", (close) => {
    const name = forms.text("Name", { required: true, maxlength: "100", value: key?.name, placeholder: "Production backend" });
    const mode = forms.select("Mode", { live: "Live: mainnets (svc_live_…)", test: "Test: testnets (svc_test_…)" });
    const scopes = forms.checks("Scopes", SCOPES, key?.scopes ?? Object.keys(SCOPES));
    const grantable = Object.entries(ACCOUNT_SCOPES).filter(([scope, [, permission]]) => account.can(permission) || key?.scopes.includes(scope));
    const accountScopes = forms.checks("Account", Object.fromEntries(grantable.map(([scope, [label]]) => [scope, label])), key?.scopes ?? []);
    const requests = forms.count("Requests per second", { value: key?.requests_per_second ?? "", min: "1", placeholder: "Account limit" });
    const units = forms.count("Units per second", { value: key?.units_per_second ?? "", min: "1", placeholder: "Account limit" });
    const ips = forms.lines("Allowed IP addresses", { rows: 2, value: key?.allowed_ips.join("\n"),
      hint: "One address or CIDR block per line, such as 203.0.113.0/24. Leave empty to allow any." });
    const origins = forms.lines("Allowed origins", { rows: 2, value: key?.allowed_origins.join("\n"),
      hint: "One web origin per line, such as https://app.example.com, whose pages may use the key from a browser. Leave empty to allow any client." });
    const allowedNetworks = forms.lines("Networks", { rows: 2, value: key?.allowed_networks.join("\n"), placeholder: "ethereum/mainnet",
      hint: "One per line. Leave empty to allow all." });
    const allowedMethods = forms.lines("Methods", { rows: 2, value: key?.allowed_methods.join("\n"), placeholder: "eth_call",
      hint: "JSON-RPC methods, one per line. Leave empty to allow all that the scopes allow." });
    const allowedContracts = forms.lines("Contracts", { rows: 2, value: key?.allowed_contracts.join("\n"), placeholder: "0x…",
      hint: "Addresses on EVM chains, one per line. Calls that may reach others are refused. Leave empty to allow all." });
    const inUrl = forms.checks("URLs", { allow_in_url: "Accept this key in URLs" }, key?.allow_in_url ? ["allow_in_url"] : [], {
      hint: "For wallets and tools that take only a URL. URLs end up in histories, logs and screenshots, and everyone who sees one can use the key: restrict it to origins, addresses, contracts or methods." });
    const isPrivate = forms.checks("Transactions", { private_transactions: "Send transactions to private relays only" }, key?.private_transactions ? ["private_transactions"] : [], {
      hint: "They never reach the public mempool, where others could trade ahead of them. On networks without a relay, transactions are refused." });
    const publicPage = button("Fill in for a public page", () => {
      scopes.write(PUBLIC_PAGE.scopes);
      accountScopes.write([]);
      allowedMethods.write(PUBLIC_PAGE.methods.join("\n"));
      inUrl.write(["allow_in_url"]);
      origins.control.required = true;
      origins.control.focus();
    }, { kind: "small" });
    const owner = forms.text("Owner", { maxlength: "200", value: key?.owner, placeholder: "Payments team" });
    const expires = forms.text("Expires", { type: "datetime-local", value: key?.expires_at ? localTime(key.expires_at) : "", hint: "Leave empty for never." });
    const remark = forms.text("Note", { maxlength: "500", value: key?.note, placeholder: "What the key is for" });
    const directives = forms.checks("Directives", key?.directives.includes("upstream") ? { ...DIRECTIVES, upstream: "Choose the upstream (X-Upstream)" } : DIRECTIVES,
      key?.directives ?? Object.keys(DIRECTIVES));
    const fault = forms.text("Faults", { value: key?.fault, maxlength: "200", placeholder: "latency=800ms, status=503, p=0.2",
      hint: "Spoils the replies to this test key, the events of its sockets and the deliveries of webhooks it creates. Leave empty for none." });
    const advanced = el("details.more", { open: Boolean(key) }, el("summary", null, "Limits and restrictions"),
      el("p", null, publicPage), inUrl.node, isPrivate.node, forms.row(ips.node, origins.node), forms.row(requests.node, units.node), forms.row(allowedNetworks.node, allowedMethods.node), allowedContracts.node, accountScopes.node, directives.node, key?.mode === "test" && fault.node);
    const send = async () => {
      const values = { name: name.read(), scopes: [...scopes.read(), ...accountScopes.read()], allowed_ips: format.splitList(ips.read()), allowed_origins: format.splitList(origins.read()), directives: directivesOf(directives.read()),
        allowed_networks: format.splitList(allowedNetworks.read()), allowed_methods: format.splitList(allowedMethods.read()),
        allowed_contracts: format.splitList(allowedContracts.read()), allow_in_url: inUrl.read().length > 0, private_transactions: isPrivate.read().length > 0, owner: owner.read(), note: remark.read() };
      // The field has no seconds: an expiry that was not edited stays as it is.
      if (expires.read() !== (key?.expires_at ? localTime(key.expires_at) : "")) values.expires_at = expires.read() ? new Date(expires.read()).toISOString() : null;
      if (!values.scopes.length) throw new Error("Select at least one scope.");
      const limits = { requests_per_second: requests.read(), units_per_second: units.read() };
      if (key) {
        await account.patch(`/keys/${key.id}`, { ...values, ...limits, ...(key.mode === "test" ? { fault: fault.read() } : {}) });
        toast("Key updated");
      } else {
        const set = Object.fromEntries(Object.entries(limits).filter(([, value]) => value !== null));
        await reveal(await account.post("/keys", { ...values, ...set, mode: mode.read() }), "Key created");
      }
      close();
      await reload();
    };
    return forms.form([forms.row(name.node, ...(key ? [] : [mode.node])), forms.row(owner.node, expires.node), remark.node, scopes.node, advanced],
      { label: key ? "Save changes" : "Create key", send, cancel: close, labels: LABELS });
  });
}

/* Null means the usual directives, also those of later versions. */
const directivesOf = (chosen) => (chosen.join() === Object.keys(DIRECTIVES).join() ? null : chosen);

function rotate(key, reload) {
  dialog("Rotate key", (close) => {
    const overlap = forms.select("Expire the old key", OVERLAPS, { value: "86400" });
    return [el("p", null, `This creates a new key with the scopes and limits of “${key.name}”. Both keys work until the old one expires.`),
      forms.form(overlap.node, {
        label: "Rotate key",
        labels: { overlap_s: "Expire the old key" },
        cancel: close,
        send: async () => {
          await reveal(await account.post(`/keys/${key.id}/rotate`, { overlap_s: Number(overlap.read()) }), "Key rotated");
          close();
          await reload();
        },
      })];
  });
}

async function setStatus(key, status, reload) {
  await account.patch(`/keys/${key.id}`, { status });
  await reload();
}

const disable = (key, reload) => confirm("Disable key", `Requests with “${key.name}” (${key.hint}) are refused until you enable it again.`, "Disable key",
  () => setStatus(key, "disabled", reload));

const revoke = (key, reload) => confirm("Revoke key",
  `“${key.name}” (${key.hint}) stops working within a second. This cannot be undone.`, "Revoke key",
  async () => {
    await account.remove(`/keys/${key.id}`);
    toast("Key revoked");
    await reload();
  });

/* Shows a new key, the only time it is visible. */
async function reveal(created, title) {
  const match = (await networks()).find((each) => each.class === created.mode);
  secretDialog(title, (close) => [
    el("p", null, "Copy this key now. You cannot see it again."),
    secretField(created.key, "API key"), match && created.allow_in_url && secretField(`${location.origin}/v1/rpc/${match.network}/${created.key}`, "URL for wallets and tools"),
    match && codeBlock("Try it", tryIt(created.key, match)).node,
    el("div.actions", null, button("Done", close, { kind: "main" }))]);
}

/* A command that asks the network for its head. */
function tryIt(key, { network, samples: [call] }) {
  const body = JSON.stringify({ jsonrpc: "2.0", id: 1, ...call });
  return `curl ${location.origin}/v1/rpc/${network} \\\n  -H 'X-API-Key: ${key}' \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}
