/* Failed requests by status, code, method and key. Each row leads to its requests. Operators see those of all accounts. */

import { account, admin, query } from "../api.js";
import { bar, el } from "../dom.js";
import { asyncRegion, card, empty, heading, idText, methodName, outcome, table } from "../components.js";
import * as format from "../format.js";
import { linkTo, place, setParams } from "../location.js";
import { rangeControl, rangeIn, rangeParams, spanOf, usualRange } from "../ranges.js";

const LEAD = "Recorded failures by status, error code, method and key, also of requests that were refused and are not part of the usage. Records are kept for a few days.";
// Names of keys up to this length stay in one line.
const SHORT = 24;
const FILTERS = ["account", "network", "method", "key"];
const filtersIn = (params) => Object.fromEntries(FILTERS.filter((name) => params[name]).map((name) => [name, params[name]]));

export const show = () => showErrors(account, { overview: "overview", requests: "requests" });
export const showForOperators = () => showErrors(admin, { overview: "operator/usage", requests: "operator/requests" });

async function showErrors(client, paths) {
  const { params } = place();
  const filters = filtersIn(params);
  let range = rangeIn(params, usualRange(client === account && account.session.account.created_at));
  const list = asyncRegion(async () => {
    const { from, to } = spanOf(range);
    const { errors } = await client.get(`/errors${query({ since: from, until: to, ...filters })}`);
    return errorsTable(errors, { client, path: paths.requests, more: { since: from, until: to, ...filters } });
  });
  const control = rangeControl(range, (next) => {
    range = next;
    setParams({ ...rangeParams(range), ...filters });
    list.reload();
  });
  await list.ready;
  return [el("a.crumb", { href: linkTo(paths.overview, { ...rangeParams(range), ...filters }) }, client === account ? "← Overview" : "← Usage"),
    heading("Errors", { lead: LEAD, actions: control.node }), card(null, filterList(filters), list.node)];
}

const filterList = (filters) => Object.keys(filters).length > 0
  && el("p.hint", null, `Only ${Object.entries(filters).map(([name, value]) => `${name} ${value}`).join(", ")}.`);

function errorsTable(errors, { client, path, more }) {
  if (!errors.length) return empty("No errors in this period", "Failures appear here about a second after they happen.");
  const most = Math.max(...errors.map(({ count }) => count));
  const link = ({ status, code, method, key_id: key }) => linkTo(path, { reason: "failed", ...more, status, code, method, key });
  return table("Errors", [
    { name: "Status", show: (each) => outcome(each.status, true) },
    { name: "Code", show: (each) => [el("code", null, each.code ?? format.NONE), el("span.below.breaks", { title: each.example_message }, format.beginning(each.example_message, 160))] },
    { name: "Method", show: (each) => el("span.nowrap", null, methodName(each.method)) },
    { name: client === admin ? "Key, account" : "Key", show: (each) => [
      each.key_name ? el("span", { class: each.key_name.length <= SHORT && "nowrap" }, each.key_name) : idText(each.key_id),
      client === admin && el("span.below", null, each.account_name ?? idText(each.account_id))] },
    client === admin && { name: "Upstream", show: (each) => each.upstreams.join(", ") || format.NONE },
    { name: "Requests", kind: "num", show: (each) => el("div", null, el("a", { href: link(each) }, format.number(each.count)), bar(each.count / most, "bad")) },
    { name: "Last", show: (each) => el("span", { title: format.time(each.last_at) }, format.shortTime(each.last_at)) },
  ], errors);
}
