/* Requests: records of failed, slow and sampled requests, and what happened to a single one. Operators see those of all accounts. */

import { account, admin, query } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncRegion, button, card, codeBlock, empty, facts, heading, idField, methodName, moment, outcome, pager, poll, segmentedControl, table, toast } from "../components.js";
import * as format from "../format.js";
import { place, setParams } from "../location.js";
import { highlighted } from "./json.js";
import { curl } from "./snippets.js";

const LIMIT = 50;
const LIVE_S = 2;
const REASONS = { "": "All", failed: "Failed", slow: "Slow", sampled: "Sampled", asked: "Asked for" };
const ACCOUNT_FILTERS = { network: "network", method: "method", status: "status", key: "key" };
const OPERATOR_FILTERS = { account: "account", ...ACCOUNT_FILTERS, upstream: "upstream" };
const KINDS = { first: "First", retry: "Retry, after a failure", hedge: "Hedge, beside a slow one", check: "Check of the reply", read: "Read for the reply" };
// Surfaces whose records are single JSON-RPC calls, which can be repeated.
const CALLS = new Set(["http", "item", "socket"]);
const CHIPS = ["code", "since", "until"];
const LEAD = "Failed and slow requests are always recorded, others by a sample, or with the header X-Explain: 1.";

export const show = ([id]) => (id ? showRequest(account, id, "#/requests") : showList(account, "#/requests"));
export const showForOperators = ([id]) => (id ? showRequest(admin, id, "#/operator/requests") : showList(admin, "#/operator/requests"));

async function showList(client, base) {
  const { params } = place();
  const names = client === admin ? OPERATOR_FILTERS : ACCOUNT_FILTERS;
  const filters = Object.fromEntries(["reason", ...Object.keys(names), ...CHIPS].map((name) => [name, params[name] ?? ""]));
  filters.page = 1;
  let isLive = false;
  let needsChoices = true;
  const chips = el("div.filter");
  const selects = el("div.filter");
  const list = asyncRegion(async () => {
    const found = await client.get(`/requests${query({ ...filters, limit: LIMIT, choices: needsChoices || "" })}`);
    if (found.choices) setChildren(selects, filterSelects(names, found.choices, filters, change));
    needsChoices = false;
    return requestsTable(found, { filters, reload: list.reload, base, isOperator: client === admin });
  });
  const change = (values) => {
    Object.assign(filters, values, { page: 1 });
    const { page, ...kept } = filters;
    setParams(kept);
    // The keys of one account are not those of another.
    needsChoices = "account" in values;
    setChildren(chips, filterChips(filters, change));
    list.reload();
  };
  setChildren(chips, filterChips(filters, change));
  const live = button("Live", () => {
    isLive = !isLive;
    live.setAttribute("aria-pressed", String(isLive));
  }, { "aria-pressed": "false" });
  poll(list.node, LIVE_S, async () => { if (isLive && filters.page === 1) await list.reload(); });
  const parts = [heading("Requests", { lead: LEAD, actions: [searchForm(base), live] }), card(null,
    el("div.spread", null, segmentedControl("Recorded because", REASONS, filters.reason, (reason) => change({ reason })), selects, chips), list.node)];
  if (client === account && account.can("administer")) parts.push(await paramsCard());
  await list.ready;
  return parts;
}

/* Filters that links from other pages set. */
function filterChips(filters, change) {
  const chip = (name, text, cleared) => button([text, " ×"], () => change(cleared), { kind: "small", class: "small chip", "aria-label": `Remove filter ${name}` });
  const { code, since, until } = filters;
  return [code && chip("code", `Code: ${code}`, { code: "" }),
    since && until && chip("time", format.span(since, until), { since: "", until: "" })];
}

function searchForm(base) {
  const id = el("input", { type: "search", required: true, maxlength: "90", placeholder: "req_…", "aria-label": "Request ID",
    title: "The X-Request-Id of a reply. Add .N for item N of a batch." });
  return el("form.find", { onsubmit: (event) => {
    event.preventDefault();
    location.hash = `${base}/${encodeURIComponent(id.value.trim())}`;
  } }, id, el("button", { type: "submit" }, "Explain"));
}

/* A select for each filter, with the values that the newest records have. */
function filterSelects(names, choices, filters, change) {
  return Object.entries(names).map(([name, noun]) => {
    const options = { "": `Any ${noun}`, ...Object.fromEntries((choices[name] ?? []).map(({ value, name: shown }) => [value, shown])) };
    // A link may name a value that no recent record has.
    if (filters[name]) options[filters[name]] ??= filters[name];
    const { control } = forms.select(noun, options, { value: filters[name], "aria-label": format.label(noun), onchange: () => {
      // Keys belong to an account.
      change({ ...(name === "account" && { key: "" }), [name]: control.value });
    } });
    return control;
  });
}

const lastAsked = ({ attempts }) => attempts.at(-1)?.upstream;
const more = (count) => (count > 1 ? ` +${count - 1}` : "");

function requestsTable({ requests, page, total }, { filters, reload, base, isOperator }) {
  if (!requests.length) return empty("No requests", "Requests appear here about a second after they end.");
  return [table("Requests", [
    { name: "Time", show: (each) => el("a", { href: `${base}/${encodeURIComponent(each.id)}` }, format.shortTime(each.at)) },
    { name: "Method", show: (each) => methodName(each.method || each.surface, each.called) },
    { name: "Network", show: (each) => each.network ?? format.NONE },
    { name: "Status", show: (each) => [outcome(each.status, Boolean(each.error)), each.error && el("span.beside", { title: each.error_message }, each.error_message)] },
    isOperator && { name: "Account", show: (each) => named(each.account_name, each.account_id) },
    { name: "Key", show: (each) => named(each.key_name, each.key_id) },
    isOperator && { name: "Upstream", show: (each) => (lastAsked(each) ? el("span", { title: each.attempts.map(({ upstream }) => upstream).join(", ") }, lastAsked(each), more(each.attempts.length)) : format.NONE) },
    { name: "Duration", kind: "num", show: (each) => format.millis(each.ms) },
    !isOperator && { name: "Upstreams asked", kind: "num", show: (each) => format.number(each.attempts.length) },
    !isOperator && { name: "Recorded", show: (each) => format.label(each.recorded) },
  ], requests.map((each) => ({ data: each, attributes: { "data-id": each.id } })), { isDense: true }),
  pager({ page, total, limit: LIMIT }, (next) => {
    filters.page = next;
    reload();
  })];
}

const named = (name, id) => (id ? el("span", { title: id }, name ?? id) : format.NONE);

async function showRequest(client, id, base) {
  const found = await client.get(`/requests/${encodeURIComponent(id)}`);
  return [heading(found.called ?? (found.method || "Request"), { lead: idField(found.id), actions: el("a.button", { href: base }, "All requests") }),
    card("Summary", facts(summaryOf(found))), card("Upstreams", attemptsTable(found.attempts)),
    found.error && errorCard(found),
    CALLS.has(found.surface) && found.network && !isRoute(found) && codeBlock(found.params ? "Repeat it" : "Repeat it: add the params, which are not recorded", repeatOf(found)).node];
}

const CAUSES = {
  client: "The request: it is not valid, or not allowed.",
  limit: "A limit of the key, the account or the service.",
  chain: "The call itself: every node would refuse it, such as a revert, a wrong param or an unknown method.",
  upstream: "No upstream could serve the call.",
  service: "A fault of the service.",
};

function errorCard({ blame, error, error_message: message }) {
  const text = codeBlock("Error", "");
  text.show(highlighted(error));
  return card("Error", el("p", null, el("b", null, message)), el("p", null, CAUSES[blame] ?? blame),
    message !== error && el("details.more", null, el("summary", null, "The whole error"), text.node));
}

const summaryOf = (found) => [
  ["Time", moment(found.at)],
  ...found.called ? [["Method", "There is no such method"]] : [],
  ...found.client_id ? [["Client's id", found.others ? `${found.client_id}, which ${format.number(found.others)} other requests have too` : found.client_id]] : [],
  ["Status", found.error && found.status < 400 ? `${found.status}, with a JSON-RPC error` : String(found.status)],
  ["Network", found.network ?? format.NONE],
  ["Duration", format.millis(found.ms)],
  ...found.price === null ? [] : [["Price", format.counted(found.price, "unit")]],
  ["Units charged", format.number(found.units)],
  ...Number(found.cost_usd) ? [["Cost at providers", `$${found.cost_usd}`]] : [],
  ["Cache", found.cache ?? format.NONE],
  ["State at block", format.number(found.block)],
  ["Reply size", `${format.number(found.bytes)} bytes`],
  ["Key", [found.key_name && el("div", null, found.key_name), idField(found.key_id)]],
  ["Account", [found.account_name && el("div", null, found.account_name), idField(found.account_id)]],
  ["Recorded because", format.label(found.recorded)],
];

const attemptsTable = (attempts) => (attempts.length ? table("Attempts", [
  { name: "Upstream", show: (each) => each.upstream },
  { name: "Attempt", show: (each) => KINDS[each.kind] ?? format.label(each.kind) },
  { name: "Began after", kind: "num", show: (each) => format.millis(each.after_ms) },
  { name: "Duration", kind: "num", show: (each) => format.millis(each.ms) },
  { name: "Outcome", show: (each) => each.outcome },
], attempts.map((each) => ({ data: each }))) : empty("No upstream was asked"));

/* Whether it is a request to a chain's REST API, also to a path that the API does not have. */
const isRoute = ({ method, called }) => method.includes(" /") || (method === "other" && !called);

/* Without recorded params, the reader fills them in. */
function repeatOf(found) {
  let params = [];
  try {
    params = JSON.parse(found.params ?? "[]");
  } catch {
    // The record has only the beginning of long params.
  }
  const body = { jsonrpc: "2.0", id: 1, method: found.called ?? found.method, params };
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
