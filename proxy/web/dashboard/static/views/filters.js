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

/* The events by their type in Format B, or in Format A if B does not have them. */
export const EVENTS = {
  ADDRESS_ACTIVITY: { name: "Activity of addresses", formatA: "address_activity", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  TOKEN_TRANSFER: { name: "ERC-20 transfers", formatA: "token_transfer", fields: [ADDRESSES, CONTRACTS, FROM, TO, MIN, FINALITY] },
  NFT_ACTIVITY: { name: "NFT mints, transfers and burns", formatA: "nft_transfer", fields: [ADDRESSES, CONTRACTS, TOKEN_IDS, FINALITY] },
  MINED_TRANSACTION: { name: "Mined transactions", formatA: "mined_transaction", fields: [HASHES, FINALITY] },
  log: { name: "Contract logs", formatA: "log", fields: [ADDRESSES, TOPICS, FINALITY] },
  INTERNAL_TRANSFER: { name: "Internal native transfers", fields: [ADDRESSES, DIRECTION, MIN, FINALITY] },
  NEW_BLOCK: { name: "New blocks", fields: [FINALITY] },
  PENDING_TRANSACTION: { name: "Pending transactions", fields: [ADDRESSES, DIRECTION, MIN, SELECTORS] },
};

/* The labels of the controls, by the members of the API. */
export const LABELS = { url: "Endpoint URL", chain: "Network", event_type: "Event", config: "Filter", fault: "Faults",
  ...Object.fromEntries(Object.values(EVENTS).flatMap(({ fields }) => fields).map(([name, label]) => [name, label])) };

/* How deliveries are written and signed. The API selects the first two by the case of the event type; every delivery has the headers of the third. */
export const FORMATS = {
  b: ["Format B", "Signed in X-Platform-Signature. Retried 7 times in about 10 hours, then the event is marked as failed."],
  a: ["Format A", "Signed with a timestamp in X-Service-Signature. Retried 5 times in about 7 hours, then the webhook pauses and you get an email."],
  standard: ["Standard Webhooks", "The body and retries of Format B. Any Standard Webhooks library verifies it by webhook-signature, which all formats have."],
};

export const formatOf = (type) => (type === type.toLowerCase() ? "a" : "b");
export const eventOf = (type) => Object.keys(EVENTS).find((event) => event === type || EVENTS[event].formatA === type);

/* The formats that an event does not have. */
export const missingFormats = (event) => (formatOf(event) === "a" ? ["b"] : EVENTS[event].formatA ? [] : ["a"]);

/* The event type of an event in a format. */
export const typeOf = (event, format) => (format === "a" ? EVENTS[event].formatA : event);

function fieldOf([name, label, kind, hint]) {
  if (typeof kind === "object") return { name, ...forms.select(label, kind, { hint }) };
  if (kind === "json") return { name, ...forms.json(label, { hint, rows: 2 }) };
  if (kind === "text") return { name, ...forms.text(label, { hint, class: "mono" }) };
  const base = forms.lines(label, { hint, rows: 2, class: "mono" });
  return { name, ...base, read: () => splitList(base.control.value) };
}

const isSet = (value) => value !== undefined && value !== "" && !(Array.isArray(value) && value.length === 0);

/* Whether a webhook can never have an event: only blocks need no filter. The API accepts such a webhook, which may get its filter later. */
export const watchesNothing = ({ event_type: type, config }) => type !== "NEW_BLOCK" && !Object.values(config ?? {}).some(isSet);

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
      fields = EVENTS[eventOf(type)].fields.map(fieldOf);
      setMode(isJson ? "json" : "fields");
    },
    showJson: () => setMode("json"),
    read: () => (isJson ? json.read() ?? {} : values()),
  };
}
