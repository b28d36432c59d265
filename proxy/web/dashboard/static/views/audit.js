/* The audit log, for operators: changes and sign-ins in all accounts and by all operators, with what was changed. */

import { admin, query } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, asyncRegion, button, card, empty, heading, table } from "../components.js";
import * as format from "../format.js";
import { linkTo, place, setParams } from "../location.js";
import { actionName, actionOf, actorOf } from "./actions.js";

const LIMIT = 50;
const LEAD = "Every change and sign-in in all accounts and by all operators, with the values before and after. Entries are kept for a year.";
const BY = { "": "Anyone", holder: "People of accounts", key: "API keys", operator: "Operators" };
const FILTERS = ["account", "by", "name", "action"];

export async function showForOperators() {
  const { params } = place();
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params[name] ?? ""]));
  let rows = [];
  let cursor = null;
  const read = async () => {
    const found = await admin.get(`/actions${query({ ...filters, cursor, limit: LIMIT })}`);
    rows = [...rows, ...found.actions];
    cursor = found.next_cursor;
    return actionsTable(rows, change);
  };
  const withMore = (node) => [node, cursor !== null && el("nav.pager", { "aria-label": "Pagination" }, asyncButton("Load more", async () => {
    setChildren(list.node, withMore(await read()));
  }, { kind: "small" }))];
  const list = asyncRegion(async () => {
    rows = [];
    cursor = null;
    return withMore(await read());
  });
  const chips = el("div.filter");
  const by = forms.select("By", BY, { value: filters.by, "aria-label": "By", onchange: () => change({ by: by.control.value, name: "" }) });
  const change = (values) => {
    Object.assign(filters, values);
    by.control.value = filters.by;
    setParams(filters);
    setChildren(chips, chipsOf(filters, change));
    list.reload();
  };
  setChildren(chips, chipsOf(filters, change));
  await list.ready;
  return [heading("Audit log", { lead: LEAD }), card(null, el("div.spread", null, el("div.filter", null, by.control), chips), list.node)];
}

const chipsOf = (filters, change) => ["account", "name", "action"].filter((name) => filters[name]).map((name) =>
  button([`${format.label(name)}: ${name === "action" ? actionName(filters[name]) : filters[name]}`, " ×"], () => change({ [name]: "" }),
    { kind: "small", class: "small chip", "aria-label": `Remove filter ${name}` }));

function actionsTable(rows, change) {
  if (!rows.length) return empty("No entries", "Changes and sign-ins appear here at once.");
  const filter = (text, values) => button(text, () => change(values), { kind: "link", title: "Filter by this" });
  return table("Audit log", [
    { name: "Time", show: (each) => format.time(each.at) },
    { name: "By", show: (each) => [filter(actorOf(each), { by: each.by, name: each.name }), each.address && el("code.below", null, each.address)] },
    { name: "Action", show: actionOf },
    { name: "Account", show: (each) => (each.account_id ? filter(each.account_name || each.account_id, { account: each.account_id }) : format.NONE) },
  ], rows.map((each) => ({ data: each, attributes: { "data-id": each.id } })));
}

/* The newest entries, for the overview. */
export async function latestActions(limit) {
  const { actions } = await admin.get(`/actions${query({ limit })}`);
  if (!actions.length) return empty("No changes yet");
  return [table("Latest changes", [
    { name: "Time", show: (each) => format.time(each.at) },
    { name: "By", show: actorOf },
    { name: "Action", show: actionOf },
    { name: "Account", show: (each) => each.account_name ?? each.account_id ?? format.NONE },
  ], actions), el("p", null, el("a", { href: linkTo("operator/audit") }, "The whole audit log"))];
}
