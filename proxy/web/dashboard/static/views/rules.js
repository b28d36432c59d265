/* The form for a gas policy's rules. An empty field means no restriction. */

import { el } from "../dom.js";
import * as forms from "../forms.js";
import { splitList } from "../format.js";

export const RESETS = { daily: "Daily", weekly: "Weekly", monthly: "Monthly" };

const DECIMAL = { inputmode: "decimal", pattern: "[0-9]+([.][0-9]+)?", placeholder: "No limit" };
const FIELDS = [
  ["max_total_usd", "Total spend (USD)", (label) => forms.text(label, DECIMAL)],
  ["reset", "Resets", (label) => forms.select(label, { "": "Never", ...RESETS })],
  ["max_per_user_usd", "Spend per sender (USD)", (label) => forms.text(label, DECIMAL)],
  ["max_gas_usd", "Spend per operation (USD)", (label) => forms.text(label, DECIMAL)],
  ["max_per_user_per_day", "Operations per sender per day", (label) => forms.count(label, { placeholder: "No limit" })],
  ["max_gas_price_gwei", "Maximum gas price (gwei)", (label) => forms.text(label, DECIMAL)],
];
const LISTS = [
  ["allowed_contracts", "Allowed contracts", "One address per line. Leave empty to allow any."],
  ["allowed_methods", "Allowed methods", "One signature or selector per line, such as transfer(address,uint256). Leave empty to allow any."],
  ["sender_allowlist", "Allowed senders", "One address per line. Leave empty to allow any."],
  ["sender_denylist", "Blocked senders", "One address per line."],
];
/* The labels of the controls, by the members of the API. */
export const LABELS = { chain: "Network", ...Object.fromEntries([...FIELDS, ...LISTS].map(([name, label]) => [name, label])) };
const KNOWN = new Set([...FIELDS, ...LISTS].map(([name]) => name));

/* `read` returns the rules that are set. `changes` returns the difference to `rules`, with null for removed ones. */
export function rulesForm(rules) {
  const figures = FIELDS.map(([name, label, make]) => ({ name, ...make(label) }));
  for (const field of figures) field.write(rules[field.name] === "never" ? "" : rules[field.name] ?? "");
  const lists = LISTS.map(([name, label, hint]) => {
    const base = forms.lines(label, { hint, rows: 2, class: "mono", value: (rules[name] ?? []).join("\n") });
    return { name, ...base, read: () => splitList(base.control.value) };
  });
  const others = Object.fromEntries(Object.entries(rules).filter(([name]) => !KNOWN.has(name)));
  const rest = forms.json("Other rules", { value: others, rows: 3, hint: "In the API's format: rate_limit, starts_at, ends_at, expiry_seconds, min_gas_efficiency." });
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
  const node = el("div", null, el("h3", null, "Limits"), forms.row(...figures.map((field) => field.node)),
    el("details.more", { open: LISTS.some(([name]) => rules[name]?.length) }, el("summary", null, "Restrictions"),
      lists.map((field) => field.node), rest.node));
  return { node, read, changes };
}
