/* The filter form of a webhook: fields for the common options of each event type, JSON for everything else. */

import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { segmentedControl } from "../components.js";
import { splitList } from "../format.js";

const ADDRESSES = ["addresses", "Addresses", "list", "One per line, up to 100,000."];
const CONTRACTS = ["contracts", "Token contracts", "list", "One address per line."];
const FROM = ["from", "Senders", "list"];
const TO = ["to", "Recipients", "list"];
const MIN = ["min_value", "Minimum value", "text", "A whole number in the smallest unit, such as wei."];
const DIRECTION = ["direction", "Direction", { "": "Both", incoming: "Incoming", outgoing: "Outgoing" }];
const HASHES = ["tx_hashes", "Transaction hashes", "list", "One per line."];
const TOPICS = ["topics", "Topics", "json", "The format of eth_getLogs: [\"0xddf2…\"], with null for any."];
const TOKEN_IDS = ["token_ids", "Token IDs", "list", "Tokens of the contracts above. Leave empty for all."];
const SELECTORS = ["selectors", "Functions", "list", "Selectors or signatures, such as transfer(address,uint256)."];
const FINALITY = ["finality", "Notify", { "": "When included in a block", safe: "When safe", finalized: "When finalized" }];

export const FILTERS = {
  address_activity: { about: "activity of addresses", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  token_transfer: { about: "ERC-20 transfers", fields: [ADDRESSES, CONTRACTS, FROM, TO, MIN, FINALITY] },
  nft_transfer: { about: "ERC-721 and ERC-1155 transfers", fields: [ADDRESSES, CONTRACTS, TOKEN_IDS, FINALITY] },
  mined_transaction: { about: "mined transactions", fields: [HASHES, FINALITY] },
  log: { about: "contract logs", fields: [ADDRESSES, TOPICS, FINALITY] },
  ADDRESS_ACTIVITY: { about: "activity of addresses", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  MINED_TRANSACTION: { about: "mined transactions", fields: [HASHES, FINALITY] },
  NFT_ACTIVITY: { about: "NFT mints, transfers and burns", fields: [ADDRESSES, CONTRACTS, TOKEN_IDS, FINALITY] },
  TOKEN_TRANSFER: { about: "ERC-20 transfers", fields: [CONTRACTS, FROM, TO, MIN, FINALITY] },
  INTERNAL_TRANSFER: { about: "internal native transfers", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  NEW_BLOCK: { about: "new blocks", fields: [FINALITY] },
  PENDING_TRANSACTION: { about: "pending transactions", fields: [ADDRESSES, DIRECTION, MIN, SELECTORS] },
};

function fieldOf([name, label, kind, hint]) {
  if (typeof kind === "object") return { name, ...forms.select(label, kind, { hint }) };
  if (kind === "json") return { name, ...forms.json(label, { hint, rows: 2 }) };
  if (kind === "text") return { name, ...forms.text(label, { hint, class: "mono" }) };
  const base = forms.lines(label, { hint, rows: 2, class: "mono" });
  return { name, ...base, read: () => splitList(base.control.value) };
}

const isSet = (value) => value !== undefined && value !== "" && !(Array.isArray(value) && value.length === 0);

/* Whether a webhook can never have an event: only blocks need no filter. The API accepts such a webhook, which may get its filter later. */
export const watchesNothing = ({ event_type: type, config }) => type !== "NEW_BLOCK" && Object.keys(config ?? {}).length === 0;

/* `setType` switches the event type; `read` returns the config. Switching to JSON starts from the values of the fields. */
export function filterForm(config) {
  const region = el("div");
  const json = forms.json("Filter", { value: config ?? {}, hint: "The webhook's config, in the API's format." });
  let fields = [];
  let isJson = Boolean(config);
  const values = () => Object.fromEntries(fields.map((field) => [field.name, field.read()]).filter(([, value]) => isSet(value)));
  const setMode = (mode) => {
    if (mode === "json" && !isJson) json.write(values());
    isJson = mode === "json";
    setChildren(region, isJson ? json.node : forms.row(...fields.map(({ node }) => node)));
  };
  const modes = config ? null : segmentedControl("Filter format", { fields: "Fields", json: "JSON" }, "fields", setMode);
  return {
    node: el("fieldset", null, el("div.spread", null, el("legend", null, "Filter"), modes), region),
    setType: (type) => {
      fields = FILTERS[type].fields.map(fieldOf);
      setMode(isJson ? "json" : "fields");
    },
    showJson: () => setMode("json"),
    read: () => (isJson ? json.read() ?? {} : values()),
  };
}
