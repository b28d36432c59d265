/* The filter of a webhook, for each event type: as fields for what most people want, as JSON for the rest. */

import { el, put } from "../dom.js";
import * as forms from "../forms.js";
import { choice } from "../components.js";
import { listed } from "../format.js";

const ADDRESSES = ["addresses", "Addresses", "list", "One on each line, up to 100,000."];
const CONTRACTS = ["contracts", "Token contracts", "list", "One on each line."];
const FROM = ["from", "Senders", "list"];
const TO = ["to", "Recipients", "list"];
const MIN = ["min_value", "Least value", "text", "In the smallest unit (wei), as a whole number."];
const DIRECTION = ["direction", "Direction", { "": "both", incoming: "incoming", outgoing: "outgoing" }];
const HASHES = ["tx_hashes", "Transaction hashes", "list", "One on each line."];
const TOPICS = ["topics", "Topics", "json", "As eth_getLogs takes them: [\"0xddf2…\"], null for any."];
const TOKEN_IDS = ["token_ids", "Token ids", "list", "Of the contracts above. Empty: all."];
const SELECTORS = ["selectors", "Called functions", "list", "Selectors or signatures: transfer(address,uint256)."];
const FINALITY = ["finality", "When", { "": "as soon as it is in a block", safe: "when it is safe", finalized: "when it is final" }];

export const FILTERS = {
  address_activity: { about: "anything of given addresses", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  token_transfer: { about: "ERC-20 transfers", fields: [ADDRESSES, CONTRACTS, FROM, TO, MIN, FINALITY] },
  nft_transfer: { about: "ERC-721 and ERC-1155 transfers", fields: [ADDRESSES, CONTRACTS, TOKEN_IDS, FINALITY] },
  mined_transaction: { about: "a transaction is mined", fields: [HASHES, FINALITY] },
  log: { about: "logs of contracts", fields: [ADDRESSES, TOPICS, FINALITY] },
  ADDRESS_ACTIVITY: { about: "an address sends or receives", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  MINED_TRANSACTION: { about: "a transaction is in a block", fields: [HASHES, FINALITY] },
  NFT_ACTIVITY: { about: "mints, transfers, burns", fields: [ADDRESSES, CONTRACTS, TOKEN_IDS, FINALITY] },
  TOKEN_TRANSFER: { about: "ERC-20 transfers", fields: [CONTRACTS, FROM, TO, MIN, FINALITY] },
  INTERNAL_TRANSFER: { about: "native transfers inside transactions", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  NEW_BLOCK: { about: "every block", fields: [FINALITY] },
  PENDING_TRANSACTION: { about: "transactions on their way", fields: [ADDRESSES, DIRECTION, MIN, SELECTORS] },
};

function fieldOf([name, label, kind, hint]) {
  if (typeof kind === "object") return { name, ...forms.select(label, kind, { hint }) };
  if (kind === "json") return { name, ...forms.json(label, { hint, rows: 2 }) };
  if (kind === "text") return { name, ...forms.text(label, { hint, class: "mono" }) };
  const made = forms.lines(label, { hint, rows: 2, class: "mono" });
  return { name, ...made, read: () => listed(made.control.value) };
}

const isGiven = (value) => value !== undefined && value !== "" && !(Array.isArray(value) && value.length === 0);

/* `follow` changes to another event type; `read` gives the config. What was typed as fields is taken over into JSON. */
export function filterForm(config) {
  const place = el("div");
  const whole = forms.json("Filter", { value: config ?? {}, hint: "The config of the webhook, as the API takes it." });
  let fields = [];
  let isJson = Boolean(config);
  const given = () => Object.fromEntries(fields.map((field) => [field.name, field.read()]).filter(([, value]) => isGiven(value)));
  const pick = (way) => {
    if (way === "json" && !isJson) whole.write(given());
    isJson = way === "json";
    put(place, isJson ? whole.node : forms.row(...fields.map(({ node }) => node)));
  };
  const ways = config ? null : choice("How the filter is given", { fields: "Fields", json: "JSON" }, "fields", pick);
  return {
    node: el("fieldset", null, el("div.spread", null, el("legend", null, "Filter"), ways), place),
    follow: (type) => {
      fields = FILTERS[type].fields.map(fieldOf);
      pick(isJson ? "json" : "fields");
    },
    show: () => pick("json"),
    read: () => (isJson ? whole.read() ?? {} : given()),
  };
}
