/* Requests: records of failed, slow and sampled requests, and what happened to a single one. Operators see those of all accounts. */

import { account, admin, query } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncRegion, button, card, codeBlock, empty, facts, heading, idField, methodName, outcome, pager, poll, segmentedControl, table, toast } from "../components.js";
import * as format from "../format.js";
import { place, setParams } from "../location.js";
import { highlighted } from "./json.js";
import { curl } from "./snippets.js";

const LIMIT = 50;
const LIVE_S = 2;
const REASONS = { "": "All", failed: "Failed", slow: "Slow", sampled: "Sampled", asked: "Asked for" };
const FIELDS = {
  method: (value) => forms.text("Method", { value, maxlength: "100", placeholder: "eth_call" }),
  network: (value) => forms.text("Network", { value, maxlength: "100", placeholder: "ethereum/mainnet" }),
  status: (value) => forms.count("Status", { value, min: "100", max: "599", placeholder: "503" }),
};
const KINDS = { first: "First", retry: "Retry, after a failure", hedge: "Hedge, beside a slow one", check: "Check of the reply", read: "Read for the reply" };
// Surfaces whose records are single JSON-RPC calls, which can be repeated.
const CALLS = new Set(["http", "item", "socket"]);
const CHIPS = ["key", "code", "account", "since", "until"];
const LEAD = "Failed and slow requests are always recorded, others by a sample, or with the header X-Explain: 1.";

export const show = ([id]) => (id ? showRequest(account, id, "#/requests") : showList(account, "#/requests"));
export const showForOperators = ([id]) => (id ? showRequest(admin, id, "#/operator/requests") : showList(admin, "#/operator/requests"));

async function showList(client, base) {
  const { params } = place();
  const filters = Object.fromEntries(["reason", ...Object.keys(FIELDS), ...CHIPS].map((name) => [name, params[name] ?? ""]));
  filters.page = 1;
  let isLive = false;
  const chips = el("div.filter");
  const list = asyncRegion(async () => requestsTable(await client.get(`/requests${query({ ...filters, limit: LIMIT })}`), filters, list.reload, base));
  const change = (values) => {
    Object.assign(filters, values, { page: 1 });
    const { page, ...kept } = filters;
    setParams(kept);
    setChildren(chips, filterChips(filters, change));
    list.reload();
  };
  setChildren(chips, filterChips(filters, change));
  const live = button("Live", () => {
    isLive = !isLive;
    live.setAttribute("aria-pressed", String(isLive));
  }, { "aria-pressed": "false" });
  poll(list.node, LIVE_S, async () => { if (isLive && filters.page === 1) await list.reload(); });
  const parts = [heading("Requests", { lead: LEAD, actions: live }), card(null, searchForm(base),
    el("div.spread", null, segmentedControl("Recorded because", REASONS, filters.reason, (reason) => change({ reason })), chips),
    filterForm(filters, change), list.node)];
  if (client === account && account.can("administer")) parts.push(await paramsCard());
  await list.ready;
  return parts;
}

/* Filters that links from other pages set. */
function filterChips(filters, change) {
  const chip = (name, text, cleared) => button([text, " ×"], () => change(cleared), { kind: "small", class: "small chip", "aria-label": `Remove filter ${name}` });
  const { key, code, account: holder, since, until } = filters;
  return [key && chip("key", `Key: ${key}`, { key: "" }), code && chip("code", `Code: ${code}`, { code: "" }),
    holder && chip("account", `Account: ${holder}`, { account: "" }),
    since && until && chip("time", format.span(since, until), { since: "", until: "" })];
}

function searchForm(base) {
  const id = forms.text("Request ID", { required: true, maxlength: "90", placeholder: "req_…", hint: "The X-Request-Id of a reply. Add .N for item N of a batch." });
  return forms.form(id.node, { label: "Explain", kind: "", isInline: true, send: async () => { location.hash = `${base}/${encodeURIComponent(id.read())}`; } });
}

function filterForm(filters, change) {
  const fields = Object.entries(FIELDS).map(([name, make]) => [name, make(filters[name])]);
  return forms.form(forms.row(...fields.map(([, each]) => each.node)), { label: "Filter", kind: "", isInline: true,
    send: async () => change(Object.fromEntries(fields.map(([name, each]) => [name, each.read() ?? ""]))) });
}

function requestsTable({ requests, page, total }, filters, reload, base) {
  if (!requests.length) return empty("No requests", "Requests appear here about a second after they end.");
  return [table("Requests", [
    { name: "Time", show: (each) => el("a", { href: `${base}/${encodeURIComponent(each.id)}` }, format.time(each.at)) },
    { name: "Method", show: (each) => [methodName(each.method || each.surface), el("span.below", null, each.network ?? "")] },
    { name: "Status", show: (each) => [outcome(each.status, Boolean(each.error)),
      each.error && el("span.below", null, format.errorText(each.error))] },
    { name: "Duration", kind: "num", show: (each) => format.millis(each.ms) },
    { name: "Upstreams asked", kind: "num", show: (each) => format.number(each.attempts.length) },
    { name: "Recorded", show: (each) => format.label(each.recorded) },
  ], requests.map((each) => ({ data: each, attributes: { "data-id": each.id } }))),
  pager({ page, total, limit: LIMIT }, (next) => {
    filters.page = next;
    reload();
  })];
}

async function showRequest(client, id, base) {
  const found = await client.get(`/requests/${encodeURIComponent(id)}`);
  return [heading(found.method || "Request", { lead: idField(found.id), actions: el("a.button", { href: base }, "All requests") }),
    card("Summary", facts(summaryOf(found))), card("Upstreams", attemptsTable(found.attempts)),
    found.error && errorCard(found),
    CALLS.has(found.surface) && found.network && codeBlock(found.params ? "Repeat it" : "Repeat it: add the params, which are not recorded", repeatOf(found)).node];
}

const CAUSES = {
  client: "The request is not valid.",
  limit: "A limit of the key, the account or the service.",
  chain: "The call itself: every node would refuse it, such as a revert, a wrong param or an unknown method.",
  upstream: "No upstream could serve the call.",
  service: "A fault of the service.",
};

function errorCard({ blame, error }) {
  const text = codeBlock("Error", "");
  text.show(highlighted(error));
  return card("Error", el("p", null, CAUSES[blame] ?? blame), text.node);
}

const summaryOf = (found) => [
  ["Time", format.time(found.at)],
  ...found.client_id ? [["Client's id", found.others ? `${found.client_id}, which ${format.number(found.others)} other requests have too` : found.client_id]] : [],
  ["Status", found.error && found.status < 400 ? `${found.status}, with a JSON-RPC error` : String(found.status)],
  ["Network", found.network ?? format.NONE],
  ["Duration", format.millis(found.ms)],
  ["Price", found.price === null ? format.NONE : `${format.number(found.price)} units`],
  ["Units charged", format.number(found.units)],
  ["Cache", found.cache ?? format.NONE],
  ["State at block", format.number(found.block)],
  ["Reply size", `${format.number(found.bytes)} bytes`],
  ["Key", idField(found.key_id)],
  ["Account", idField(found.account_id)],
  ["Recorded because", format.label(found.recorded)],
];

const attemptsTable = (attempts) => (attempts.length ? table("Attempts", [
  { name: "Upstream", show: (each) => each.upstream },
  { name: "Attempt", show: (each) => KINDS[each.kind] ?? format.label(each.kind) },
  { name: "Began after", kind: "num", show: (each) => format.millis(each.after_ms) },
  { name: "Duration", kind: "num", show: (each) => format.millis(each.ms) },
  { name: "Outcome", show: (each) => each.outcome },
], attempts.map((each) => ({ data: each }))) : empty("No upstream was asked"));

/* Without recorded params, the reader fills them in. */
function repeatOf(found) {
  let params = [];
  try {
    params = JSON.parse(found.params ?? "[]");
  } catch {
    // The record has only the beginning of long params.
  }
  const body = { jsonrpc: "2.0", id: 1, method: found.method, params };
  return curl({ method: "POST", url: `${location.origin}/v1/rpc/${found.network}`, body });
}

/* Whether records have params, which may be confidential. */
async function paramsCard() {
  const { account: holder } = await account.get("");
  const choice = forms.checks("Params", { yes: "Record the params of calls. Everyone who can sign in to this account can read them." }, holder.record_params ? ["yes"] : []);
  return card("Privacy", forms.form(choice.node, { label: "Save", send: async () => {
    await account.patch("", { record_params: choice.read().length > 0 });
    toast("Saved");
  } }));
}
