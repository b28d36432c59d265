/*
 * Addresses: the transfers, balances and NFTs of any address of an indexed network. They are read as one of the account's keys, so
 * the requests are counted and limited as its others.
 */

import { readWithKey, query } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { chainNameOf, networkField, networks } from "../networks.js";
import { asyncButton, asyncRegion, badge, button, card, empty, heading, idField, idText, moment, pager, segmentedControl, table, toast } from "../components.js";
import * as format from "../format.js";
import { linkTo, place, setParams } from "../location.js";
import { mayRequest, mayUse, sessionKeys, tokenFor } from "./session-keys.js";

const SCOPE = "data:read";
const LIMIT = 25;
// An export reads the largest pages, up to this many transfers: `penstock transfers export` has no limit.
const EXPORT_LIMIT = 100;
const MOST_EXPORTED = 10_000;
const DIRECTIONS = { "": "All", in: "In", out: "Out" };
const CATEGORIES = { "": "Any category", erc20: "ERC-20", erc721: "ERC-721", erc1155: "ERC-1155", native: "Native coin", internal: "Internal" };
const STATUSES = { included: "wait", failed: "bad" };
const FILTERS = ["direction", "category", "contract", "counterparty", "from_block", "to_block", "min_value"];
const COLUMNS = ["block_number", "block_hash", "timestamp", "tx_hash", "log_index", "category", "direction", "from", "to", "contract", "symbol", "token_id", "value", "formatted_value", "status"];
const LEAD = "Transfers, balances and NFTs of any address.";

export async function show([chain, address]) {
  const [all, keys] = await Promise.all([networks(), sessionKeys()]);
  const indexed = all.filter(({ features }) => features.includes("follower") && features.includes("webhooks"));
  const network = indexed.find((each) => chainNameOf(each.network) === chain);
  const search = searchForm(indexed, network ?? indexed[0], address ?? "");
  if (!indexed.length) return [heading("Addresses", { lead: LEAD }), card(null, empty("No network is indexed", "The operator chooses the networks in follower.networks."))];
  if (!address) return [heading("Addresses", { lead: LEAD }), card(null, search)];
  const found = network && readerOf(network, keys);
  return [heading("Address", { lead: idField(address) }), card(null, search),
    ...(found ? sections(found, address) : [card(null, network ? noKey(network) : empty("Network not found", `${chain} is not indexed.`))])];
}

function searchForm(indexed, chosen, address) {
  const network = networkField("Network", indexed, { valueOf: chainNameOf });
  if (chosen) network.write(chainNameOf(chosen.network));
  const field = forms.text("Address", { value: address, required: true, class: "mono", maxlength: "255", placeholder: "0x… or a name" });
  return forms.form(forms.row(network.node, field.node), { label: "Show", isInline: true, send: () => {
    location.hash = linkTo(`addresses/${network.read()}/${encodeURIComponent(field.read())}`);
  } });
}

const noKey = ({ network }) => empty("No key can read this", `Reading needs an active key with the scope ${SCOPE} that may be used on ${network}, and the permission to manage keys.`,
  el("a.button", { href: "#/keys" }, "API keys"));

/* Reads the paths of one network, as a key for its class of networks if there is one. */
function readerOf(network, keys) {
  const usable = keys.filter((key) => mayUse(key, network) && mayRequest(key, SCOPE) && !key.allowed_contracts.length);
  const key = usable.find(({ mode }) => mode === network.class) ?? usable[0];
  if (!key) return null;
  const chain = chainNameOf(network.network);
  return { key, chain, get: async (path, params) => readWithKey(await tokenFor(key.id), `${path}${query(params)}`) };
}

function sections(reader, address) {
  const encoded = encodeURIComponent(address);
  return [transfersCard(reader, encoded), balancesCard(reader, encoded), nftsCard(reader, encoded),
    el("p.hint", null, `Read with the key ${reader.key.name}.`)];
}

/* --- transfers --- */

function transfersCard(reader, address) {
  const { params } = place();
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params[name] ?? ""]));
  // The cursors of the pages before this one, and of this one; the first page has none.
  let cursors = [""];
  const path = `/transfers/${reader.chain}/${address}`;
  const list = asyncRegion(async () => {
    const found = await reader.get(path, { ...filters, limit: LIMIT, cursor: cursors.at(-1) });
    const go = (next) => {
      cursors = next;
      list.reload();
    };
    return [transfersTable(found, reader.chain), cursorPager(found, cursors, go), completeness(found, filters)];
  });
  const change = (values) => {
    Object.assign(filters, values);
    setParams(filters);
    cursors = [""];
    list.reload();
  };
  const save = asyncButton("Export CSV", async () => saveTransfers(await allTransfers(reader, path, filters), address), { kind: "small" });
  return card(null, el("div.spread", null, el("h2", null, "Transfers"), save),
    el("div.spread", null, segmentedControl("Direction", DIRECTIONS, filters.direction, (direction) => change({ direction })), filterFields(filters, change)),
    list.node);
}

function filterFields(filters, change) {
  const { control: category } = forms.select("Category", CATEGORIES, { value: filters.category, "aria-label": "Category", onchange: () => change({ category: category.value }) });
  const field = (name, label, attributes) => {
    const node = el("input", { "aria-label": label, placeholder: label, value: filters[name], spellcheck: "false", autocomplete: "off", ...attributes, onchange: () => change({ [name]: node.value.trim() }) });
    return node;
  };
  return el("div.filter", null, category, field("contract", "Token contract"), field("counterparty", "Other address"),
    field("from_block", "From block", { inputmode: "numeric", size: "10" }), field("to_block", "To block", { inputmode: "numeric", size: "10" }), field("min_value", "Minimum value", { inputmode: "numeric", size: "13" }));
}

const ZERO = `0x${"0".repeat(40)}`;

/* The other address of a transfer. Tokens come from and go to no one at the zero address. */
function party(chain, { direction, from, to, contract }) {
  const other = direction === "out" ? to : from;
  if (other === null) return "New contract";
  if (contract && other === ZERO) return direction === "out" ? "Burned" : "Minted";
  return el("a.narrow", { href: linkTo(`addresses/${chain}/${other}`) }, idText(other));
}

const narrowId = (text) => el("span.narrow", null, idText(text));

function transfersTable({ transfers }, chain) {
  if (!transfers.length) return empty("No transfers", "None among the indexed blocks that match.");
  return table("Transfers", [
    { name: "Time", show: (each) => [moment(each.timestamp), el("span.below", null, `Block ${format.number(each.block_number)}`)] },
    { name: "Direction", show: (each) => [badge(each.direction === "self" ? "Itself" : each.direction, "off"), each.status !== "final" && badge(each.status, STATUSES[each.status])] },
    { name: "From or to", show: (each) => party(chain, each) },
    { name: "Amount", kind: "num", show: (each) => [amountOf(each), el("span.below", null, CATEGORIES[each.category])] },
    { name: "Token", show: (each) => [each.symbol ?? format.NONE, each.contract && el("span.below", null, narrowId(each.contract))] },
    { name: "Transaction", show: (each) => narrowId(each.tx_hash) },
  ], transfers.map((each) => ({ data: each, attributes: { "data-id": `${each.tx_hash}-${each.log_index}` } })));
}

const amountOf = ({ formatted_value: shown, value, token_id: id }) => {
  const amount = shown ?? value ?? format.NONE;
  return id === null ? amount : `${amount === "1" ? "" : `${amount} × `}#${format.beginning(id, 12)}`;
};

function cursorPager({ next }, cursors, go) {
  if (!next && cursors.length === 1) return null;
  return el("nav.pager", { "aria-label": "Pagination" },
    button("Previous", () => go(cursors.slice(0, -1)), { kind: "small", disabled: cursors.length === 1 }),
    el("span", null, `Page ${cursors.length}`),
    button("Next", () => go([...cursors, next]), { kind: "small", disabled: !next }));
}

/* From which block on nothing is missing. */
function completeness({ complete_from: from, block_number: head }, { category }) {
  const known = Object.entries(from).filter(([name]) => !category || name === category);
  const kept = known.filter(([, block]) => block !== null).map(([name, block]) => `${CATEGORIES[name]} from block ${format.number(block)}`);
  return el("p.hint", null, kept.length ? `Complete up to block ${format.number(head)}: ${kept.join(", ")}.` : "The operator does not keep transfers of this category.");
}

async function allTransfers(reader, path, filters) {
  const found = [];
  let cursor = "";
  do {
    const page = await reader.get(path, { ...filters, limit: EXPORT_LIMIT, cursor });
    found.push(...page.transfers);
    cursor = page.next ?? "";
  } while (cursor && found.length < MOST_EXPORTED);
  if (cursor) toast(`The file has the first ${format.number(found.length)} transfers. Choose fewer with a filter, or ask the operator for an export.`, "bad");
  return found;
}

/* A spreadsheet would run a text that begins like a formula. */
const cell = (value) => {
  const text = String(value ?? "");
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

function saveTransfers(rows, address) {
  const lines = [COLUMNS, ...rows.map((row) => COLUMNS.map((name) => row[name]))].map((line) => line.map(cell).join(","));
  const file = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
  const link = el("a", { download: `transfers-${address}.csv` });
  link.href = file;
  link.click();
  URL.revokeObjectURL(file);
}

/* --- balances and NFTs --- */

/* A card with pages of one kind, which is read again for each. */
function pagedCard(title, read, show) {
  let page = 1;
  const list = asyncRegion(async () => {
    const found = await read({ page, limit: LIMIT });
    return [show(found), pager({ ...found, limit: LIMIT }, (next) => {
      page = next;
      list.reload();
    })];
  });
  return card(title, list.node);
}

const balancesCard = (reader, address) => pagedCard("Balances", (page) => reader.get(`/tokens/${reader.chain}/balances/${address}`, page), ({ tokens }) => (tokens.length ? table("Balances", [
  { name: "Token", show: (each) => [each.symbol ?? each.name ?? format.NONE, each.contract && el("span.below", null, idText(each.contract))] },
  { name: "Balance", kind: "num", show: (each) => each.formatted_balance ?? each.balance },
  { name: "Value", kind: "num", show: (each) => format.usd(each.usd_value) },
], tokens) : empty("No tokens")));

const nftsCard = (reader, address) => pagedCard("NFTs", (page) => reader.get(`/nfts/${reader.chain}/owned/${address}`, page), ({ nfts }) => (nfts.length ? table("NFTs", [
  { name: "NFT", show: (each) => [format.beginning(each.name ?? `#${each.token_id}`, 40), el("span.below", null, each.collection_name ?? each.standard)] },
  { name: "Contract", show: (each) => idText(each.contract) },
  { name: "Token ID", show: (each) => format.beginning(each.token_id, 24) },
  { name: "Balance", kind: "num", show: (each) => each.balance },
], nfts) : empty("No NFTs")));
