/* The rules of a gas policy as a form. A rule that is left empty does not restrict. */

import { el } from "../dom.js";
import * as forms from "../forms.js";
import { listed } from "../format.js";

export const RESETS = { daily: "each day", weekly: "each week", monthly: "each month" };

const DOLLARS = { inputmode: "decimal", pattern: "[0-9]+([.][0-9]+)?", placeholder: "no limit" };
const FIELDS = [
  ["max_total_usd", () => forms.text("Whole policy, US dollars", DOLLARS)],
  ["reset", () => forms.select("Starts anew", { "": "never", ...RESETS })],
  ["max_per_user_usd", () => forms.text("Each sender, US dollars", DOLLARS)],
  ["max_gas_usd", () => forms.text("One operation, US dollars", DOLLARS)],
  ["max_per_user_per_day", () => forms.count("Operations of a sender in a day", { placeholder: "no limit" })],
  ["max_gas_price_gwei", () => forms.text("Highest gas price, gwei", { ...DOLLARS })],
];
const LISTS = [
  ["allowed_contracts", "Contracts that may be called", "Addresses, one on each line. Empty: any."],
  ["allowed_methods", "Methods that may be called", "Signatures or selectors, one on each line: transfer(address,uint256). Empty: any."],
  ["sender_allowlist", "Only these senders", "Addresses, one on each line. Empty: any."],
  ["sender_denylist", "Never these senders", "Addresses, one on each line."],
];
const KNOWN = new Set([...FIELDS, ...LISTS].map(([name]) => name));

/* `read`: rules that are set; `changes`: what differs from before, null for what is gone. */
export function rulesForm(rules) {
  const figures = FIELDS.map(([name, make]) => ({ name, ...make() }));
  for (const field of figures) field.write(rules[field.name] === "never" ? "" : rules[field.name] ?? "");
  const lists = LISTS.map(([name, label, hint]) => {
    const made = forms.lines(label, { hint, rows: 2, class: "mono", value: (rules[name] ?? []).join("\n") });
    return { name, ...made, read: () => listed(made.control.value) };
  });
  const others = Object.fromEntries(Object.entries(rules).filter(([name]) => !KNOWN.has(name)));
  const rest = forms.json("Other rules", { value: others, rows: 3, hint: "rate_limit, starts_at, ends_at, expiry_seconds, min_gas_efficiency: as the API takes them." });
  const read = () => {
    const set = [...figures, ...lists].map(({ name, read: value }) => [name, value()]);
    const isSet = ([, value]) => value !== "" && value !== null && !(Array.isArray(value) && !value.length);
    return { ...Object.fromEntries(set.filter(isSet)), ...(rest.read() ?? {}) };
  };
  const changes = () => {
    const after = read();
    const names = new Set([...Object.keys(rules), ...Object.keys(after)]);
    const differs = [...names].filter((name) => JSON.stringify(rules[name]) !== JSON.stringify(after[name]));
    return Object.fromEntries(differs.map((name) => [name, after[name] ?? null]));
  };
  const node = el("div", null, el("h3", null, "Caps"), forms.row(...figures.map((field) => field.node)),
    el("details.more", { open: LISTS.some(([name]) => rules[name]?.length) }, el("summary", null, "Who, what and when"),
      lists.map((field) => field.node), rest.node));
  return { node, read, changes };
}
