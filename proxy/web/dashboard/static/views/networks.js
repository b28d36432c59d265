/* Networks: the addresses of each network's endpoints to copy, and its live status. */

import { account } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { asyncRegion, badge, card, copyButton, empty, heading, poll, table } from "../components.js";
import * as format from "../format.js";

const REFRESH_S = 10;
const TONES = { up: "good", degraded: "wait", down: "bad" };
const LEAD = "Send the key of your account as X-API-Key. A WebSocket also takes it as ?apiKey=.";

export async function show() {
  let search = "";
  const list = asyncRegion(async () => networksTable((await account.get("/chains")).networks.filter((each) => namesOf(each).includes(search))));
  const field = forms.text("Search", { type: "search", placeholder: "Chain, network or chain id", oninput: () => {
    search = field.read().toLowerCase();
    list.reload();
  } });
  await list.ready;
  const node = el("div", null, heading("Networks", { lead: LEAD }), card(null, field.node, list.node));
  poll(node, REFRESH_S, list.reload);
  return node;
}

const idOf = ({ chain, network }) => `${chain}/${network}`;
const namesOf = (each) => [idOf(each), each.title, ...each.aliases, each.chain_id].join(" ").toLowerCase();

/* REST paths name a chain, or a network with a dash. */
const wordOf = ({ chain, network }) => `${chain}-${network}`;

const urlsOf = (each) => ({
  HTTP: each.features.includes("rpc") ? `${location.origin}/v1/rpc/${idOf(each)}` : `${location.origin}/v1/rest/${idOf(each)}/{path}`,
  WebSocket: each.features.includes("subscriptions") && `${location.origin.replace(/^http/, "ws")}/v1/ws/${idOf(each)}`,
  REST: each.features.includes("tokens") ? `${location.origin}/v1/tokens/${wordOf(each)}/balances/{address}`
    : each.features.includes("gas_prices") && `${location.origin}/v1/gas/${wordOf(each)}/prices`,
  Bundler: each.features.includes("bundler") && `${location.origin}/v1/bundler/${idOf(each)}`,
});

function networksTable(found) {
  if (!found.length) return empty("No networks found");
  return table("Networks", [
    { name: "Network", show: (each) => [`${each.title} ${each.network}`, el("span.below", null, idOf(each), each.chain_id !== null && ` · chain id ${each.chain_id}`)] },
    { name: "Status", show: (each) => badge(each.status, TONES[each.status]) },
    { name: "Block", kind: "num", show: (each) => format.number(each.block) },
    { name: "Endpoints", show: (each) => el("ul.urls", null, Object.entries(urlsOf(each)).filter(([, url]) => url).map(([kind, url]) =>
      el("li", null, el("span.hint", null, kind), el("code", null, url), copyButton(url, "Copy", { "aria-label": `Copy ${kind} URL of ${idOf(each)}` })))) },
  ], found.map((each) => ({ data: each, attributes: { "data-id": idOf(each) } })));
}
