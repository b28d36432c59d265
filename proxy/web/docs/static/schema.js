/* Tables of fields, drawn from the schemas of the OpenAPI document. */

import { code, collapsible, el, markdown, spaced } from "./dom.js";

// A nested object with more fields starts collapsed, or it would push its siblings off the screen.
const MAX_OPEN_FIELDS = 8;
export const spec = { doc: {} };

const lookup = (ref) => ref.slice(2).split("/").reduce((node, key) => node?.[key], spec.doc) ?? {};
const refName = (node) => node?.$ref?.split("/").pop();
const optionsOf = (schema) => schema.oneOf ?? schema.anyOf;
const isLeaf = (schema) => !schema.properties && !schema.items && !optionsOf(schema);
export const valuesOf = (holder) => Object.values(holder.examples ?? {}).map((example) => example.value);

/* Keywords beside a $ref add to its target (JSON Schema 2020-12); annotations override it. */
export function resolve(node) {
  if (!node?.$ref) return node ?? {};
  const { $ref, ...own } = node;
  const target = resolve(lookup($ref));
  const merged = { ...target, ...own };
  if (Array.isArray(target.required)) merged.required = target.required.concat(own.required ?? []);
  return merged;
}

function typeText(node) {
  const schema = resolve(node);
  if (!schema.type) return [...new Set((optionsOf(schema) ?? []).map(typeText))].join(" or ") || "any";
  const text = (type) => (type === "array" && schema.items ? `array of ${typeText(schema.items)}` : type);
  return [schema.type].flat().map(text).join(" or ");
}

/* The type and its schema name, linked if the list of types describes it. */
export function typeLine(node) {
  const named = refName(node) ? node : node?.items;
  const name = refName(named);
  const href = name && isLeaf(resolve(named)) ? `#type-${name}` : undefined;
  return el("span.type", null, typeText(node), name && [" ", el(href ? "a.name" : "span.name", { href }, name)]);
}

function range(low, high, unit = "") {
  const [least, most] = [low, high].map((value) => value?.toLocaleString("en"));
  const text = least && most ? `${least} to ${most}` : least ? `at least ${least}` : most && `up to ${most}`;
  return text && text + unit;
}

/* The constraints of a value. Length and form of a named type are left to the list of types. */
function limits(schema, own, examples) {
  const isUseful = (value) => typeof value !== "object" && value !== schema.default && String(value).length <= 80;
  const useful = examples.filter(isUseful).slice(0, 4);
  return [
    schema.default !== undefined && ["default ", code(schema.default)],
    schema.const !== undefined && ["always ", code(schema.const)],
    schema.enum && ["one of", spaced(schema.enum)],
    range(schema.minimum, schema.maximum),
    range(own.minLength, own.maxLength, " characters"),
    range(schema.minItems, schema.maxItems, " items"),
    schema.format && ["format ", code(schema.format)],
    own["x-form"] ?? (own.pattern && ["matches ", code(own.pattern)]),
    useful.length > 0 && !schema.enum && ["for example", spaced(useful)],
  ];
}

/* A brief description is the first sentence of a named type; the list of types has the rest. */
export function description(node, isBrief) {
  const text = resolve(node).description ?? "";
  return markdown(isBrief && !node.description ? text.split(/(?<=\.)\s/)[0] : text);
}

function fieldRow({ name, node, required, tag, examples, needs, id, isBrief }) {
  const notes = [...limits(resolve(node), node, examples ?? node.examples ?? []), needs && ["requires", spaced(needs)]];
  const list = notes.filter(Boolean).map((note) => el("li", null, note));
  return el("tr", { id },
    el("th", { scope: "row" }, el("code.field", null, name), required && el("span.required", null, "required"),
      el("div.types", null, typeLine(node), tag && el("span.tag", null, tag))),
    el("td", null, description(node, isBrief), list.length > 0 && el("ul.notes", null, list)));
}

const fieldTable = (label, rows) => el("table.fields", { "aria-label": label }, el("tbody", null, rows));

function nestedRow(node, trail, isBrief) {
  const inner = shape(node, trail, isBrief);
  const core = node.items ?? node;
  const isOpen = Object.keys(resolve(core).properties ?? {}).length <= MAX_OPEN_FIELDS && trail.length < 3;
  const label = ["Fields of ", code(refName(core) ?? "the object")];
  return inner && el("tr.nested", null, el("td", { colspan: "2" }, collapsible(label, inner, isOpen)));
}

/* The fields or alternatives of a schema. Null for a leaf, and for a schema already on the trail (recursion). */
export function shape(node, trail, isBrief) {
  const name = refName(node);
  const schema = resolve(node);
  if (name && trail.includes(name)) return null;
  const deeper = name ? [...trail, name] : trail;
  if (schema.items) return shape(schema.items, deeper, isBrief);
  if (!schema.properties) return optionsOf(schema)?.map((option, at) => collapsible([at ? "or" : "either", typeLine(option)],
    [description(option), shape(option, deeper, isBrief)], at === 0 && trail.length < 2)) ?? null;
  return fieldTable(name ?? "Fields", Object.entries(schema.properties).map(([field, inner]) => [
    fieldRow({ name: field, node: inner, required: schema.required?.includes(field), isBrief,
      needs: schema.dependentRequired?.[field] }),
    nestedRow(inner, deeper, isBrief)]));
}

export const valueTable = (label, values) => fieldTable(label, values.map((value) => fieldRow({
  ...value, tag: value.in, node: { ...value.schema, description: value.description },
  examples: [value.example ?? null, ...valuesOf(value)] })));

export const typeTable = () => fieldTable("Types", Object.entries(spec.doc.components.schemas)
  .filter(([, schema]) => isLeaf(schema)).map(([name, node]) => fieldRow({ name, node, id: `type-${name}` })));
