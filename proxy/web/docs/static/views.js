/* The sections of the reference: the guide, one page per operation and per event, and the types. */

import { block, blocks, code, collapsible, el, inline, markdown, panel, slug, spaced, table } from "./dom.js";
import { credentialsOf, requestOf, samples, server } from "./samples.js";
import { description, resolve, shape, spec, typeLine, typeTable, valuesOf, valueTable } from "./schema.js";

const SOURCE = "/v1/openapi.json";
const METHODS = ["get", "post", "put", "patch", "delete"];

const statusBadge = (status) => el(`span.status.s${status[0]}`, null, status);
export const methodBadge = (method) => el(`span.method.${method}`, null, method.toUpperCase());
const pair = (left, right) => el("div.pair", null, el("div.text", null, left), right && el("div.sample", null, right));

/* --- request bodies and responses --- */
function examplesOf(media) {
  const given = Object.entries(media.examples ?? {});
  if (given.length) return given.map(([key, { summary, value }]) => ({ key, name: summary ?? key, value }));
  return (resolve(media.schema).examples ?? []).map((value, at) => ({ name: `Example ${at + 1}`, value }));
}

const body = (media, isBrief) =>
  [el("p.body", null, typeLine(media.schema)), description(media.schema), shape(media.schema, [], isBrief)];
const bodyPanel = (media, label) =>
  panel(label, examplesOf(media).map(({ name, value }) => ({ name, texts: { JSON: JSON.stringify(value, null, 2) } })));

function replyContent(status, reply) {
  const [media] = Object.values(reply.content ?? {});
  const headers = Object.entries(reply.headers ?? {}).map(([name, node]) => ({ name, ...resolve(node) }));
  const hint = el("span.hint", null, headers.map(({ name }) => name).join(", "));
  const more = headers.length > 0 && collapsible(["Headers", hint], valueTable("Headers", headers));
  const text = media ? body(media, true) : el("p.body", null, "No body.");
  return pair([text, more], media && bodyPanel(media, `${status} response`));
}

function responseSection([status, node]) {
  const reply = resolve(node);
  const isOpen = status < "300" && Boolean(reply.content);
  return collapsible([statusBadge(status), el("span", null, inline(reply.description))], () => replyContent(status, reply), isOpen);
}

function methodSection([name, { params, result }]) {
  const part = (label, node) => [el("h3", null, `${label} `, typeLine(node)), description(node), shape(node, [], true)];
  return collapsible(code(name), [params.map((param, at) => part(`Param ${at + 1}`, param)), part("Result", result)]);
}

const responses = (operation) => [el("h2", null, "Responses"),
  el("div.list", null, Object.entries(operation.responses).map(responseSection))];

/* --- operations --- */
export function operations() {
  const each = (path, item) => ([method, operation]) => ({ method, path, operation, id: operation.operationId,
    parameters: [...(item.parameters ?? []), ...(operation.parameters ?? [])].map(resolve) });
  const calls = (item) => Object.entries(item).filter(([key]) => METHODS.includes(key));
  return Object.entries(spec.doc.paths).flatMap(([path, item]) => calls(item).map(each(path, item)));
}

function pathLine({ method, path }) {
  const parts = (new URL(server()).pathname + path).split(/(\{\w+\}|\/)/);
  return el("p.path", null, methodBadge(method), el("code", null,
    parts.map((part) => (part === "/" ? [el("wbr"), part] : part[0] === "{" ? el("var", null, part) : part))));
}

/* What the caller needs, and the price of a request. */
function accessLine({ operation, id }) {
  const units = spec.doc["x-units"]?.operations[id];
  const { headers, cookie } = credentialsOf(operation);
  const needed = cookie ? ["Session of a signed-in account", operation["x-scope"] && [", or scope ", code(operation["x-scope"])]] : headers?.Authorization ? "Operator token"
    : headers ? [operation["x-scope"] ? ["Scope ", code(operation["x-scope"])] : "Any API key"] : "No authentication";
  return el("p.scope", null, needed, units !== undefined && ` · ${units} compute unit${units === 1 ? "" : "s"}`);
}

/* Operations that take an API key can be tried with one of the signed-in account's keys. */
function tryButton(entry, calls) {
  if (!credentialsOf(entry.operation).headers?.["X-API-Key"]) return null;
  const button = el("button.try", { type: "button" }, "Try it");
  const region = el("div.trial", null, button);
  button.addEventListener("click", async () => {
    const { trial } = await import("./trial.js");
    region.replaceChildren(...await trial({ ...requestOf(entry, calls[0]), scope: entry.operation["x-scope"] }));
    region.querySelector("select, input, textarea, a")?.focus();
  });
  return region;
}

function operationView(entry) {
  const { operation, parameters } = entry;
  const [media] = Object.values(operation.requestBody?.content ?? {});
  const calls = media ? examplesOf(media) : [];
  const variants = (calls.length ? calls : [undefined]).map((call) => ({ name: call?.name, texts: samples(entry, call) }));
  const methods = operation["x-rpc-methods"];
  return [pathLine(entry),
    pair([markdown(operation.description), accessLine(entry),
      parameters.length > 0 && [el("h2", null, "Parameters"), valueTable("Parameters", parameters)],
      media && [el("h2", null, "Request body"), body(media, false)]],
    [panel("Request", variants), media && bodyPanel(media, "Request body"), tryButton(entry, calls)]),
    methods && [el("h2", null, "Methods"), el("div.list", null, Object.entries(methods).map(methodSection))],
    responses(operation)];
}

/* --- webhook events --- */
function eventView({ post }) {
  const [media] = Object.values(post.requestBody.content);
  return [
    el("p.scope", null, el("a", { href: "#receiving-webhooks" }, "How to verify and acknowledge it")),
    pair([markdown(post.description), el("h2", null, "Body"), body(media, false)], bodyPanel(media, "Body")),
    el("h2", null, "Headers"), valueTable("Headers", post.parameters.map(resolve)), responses(post)];
}

/* --- guide: the document's introduction, split at its run-in headings --- */
function guideParts() {
  const parts = [{ title: "Overview", texts: [] }];
  for (const text of blocks(spec.doc.info.description)) {
    const [lead, title] = text.match(/^\*\*([^*]+?)\.?\*\*\s+/) ?? [""];
    if (title) parts.push({ title, texts: [] });
    parts.at(-1).texts.push(text.slice(lead.length));
  }
  return parts;
}

function schemeHeader({ type, scheme, name, in: place }) {
  if (type !== "apiKey") return scheme === "basic" ? "Authorization: Basic …" : "Authorization: Bearer …";
  return { cookie: `Cookie: ${name}=…`, query: `?${name}=…` }[place] ?? `${name}: …`;
}

const schemeTable = () => table(["Header", "Meaning"], Object.values(spec.doc.components.securitySchemes).map((scheme) =>
  [code(schemeHeader(scheme)), inline(scheme.description)]), "Authentication");

function errorTable() {
  const all = operations().flatMap(({ operation }) => Object.entries(operation.responses));
  const found = new Map(all.filter(([status]) => status >= "400").map(([status, node]) => [status, resolve(node)]));
  const codes = (reply) => new Set(Object.values(reply.content ?? {}).flatMap(valuesOf).map((value) => value.error?.code));
  return table(["Status", "Code", "Meaning"], [...found].sort(([one], [other]) => one - other).map(([status, reply]) =>
    [statusBadge(status), spaced([...codes(reply)]), inline(reply.description)]), "Errors");
}

const titled = (name) => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ").replace(/usd/i, "USD");

/* Zero means no limit. */
function planTable() {
  const plans = Object.entries(spec.doc["x-plans"] ?? {});
  const limits = Object.keys(plans[0]?.[1] ?? {});
  const shown = (value) => (value === 0 ? "no limit" : value.toLocaleString("en"));
  return table(["Limit", ...plans.map(([name]) => titled(name))],
    limits.map((limit) => [titled(limit), ...plans.map(([, plan]) => shown(plan[limit]))]), "Plans");
}

function unitTables() {
  const { methods, events } = spec.doc["x-units"] ?? { methods: {}, events: {} };
  const prices = (label, found) => collapsible(label,
    () => table(["Method", "Compute units"], Object.entries(found).map(([name, units]) => [code(name), String(units)]), label));
  return el("div.list", null, [...Object.entries(methods).map(([family, found]) => prices(`Methods (${family})`, found)),
    prices("Subscription events", events)]);
}

const networkTable = () => table(["Network", "JSON-RPC"], (spec.doc["x-networks"] ?? []).map((id) =>
  [code(id), code(`${server()}/rpc/${id}`)]), "Networks of this service");
/* The sample receivers are loaded where they are shown: the page is smaller without them. */
function receivers() {
  const place = el("div");
  fetch("/docs/receivers.json").then((reply) => reply.json()).then((texts) => place.replaceChildren(panel("Receiver", [{ texts }])));
  return [el("h2", null, "A receiver"), place];
}
/* The first call, for a reader who has just got a key. */
function firstCall() {
  const entry = operations().find(({ id }) => id === "rpc_call");
  const [example] = examplesOf(Object.values(entry.operation.requestBody.content)[0]);
  return [el("h2", null, "First call"),
    el("p", null, inline("Get an API key in the [dashboard](/dashboard#/keys), put it into the environment with `export API_KEY=svc_live_…`, and send a call:")),
    panel("First call", [{ texts: samples(entry, example) }]),
    el("p", null, inline("Then: [networks of this service](#chains-and-networks), [a first webhook](#receiving-webhooks), [errors](#errors), [limits](#limits). "
      + "The [guide](/docs/guide/) goes from here to production step by step."))];
}
const home = () => [facts(), firstCall()];
const facts = () => el("p.facts", null, el("span", null, "Base URL ", code(server())),
  el("a", { href: SOURCE }, "OpenAPI document"), el("a", { href: "/docs/guide/" }, "Guide"), el("a", { href: "/llms.txt" }, "llms.txt"));

/* What a part of the guide shows after its text. */
const EXTRAS = {
  "Overview": home, "Authentication": schemeTable, "Errors": errorTable, "Limits": planTable, "Compute units": unitTables,
  "Chains and networks": networkTable, "Receiving webhooks": receivers,
};

const guideSections = () => guideParts().map(({ title, texts }) => ({ id: slug(title), title, group: "Guide",
  words: texts.join(" "), draw: () => el("div.guide", null, texts.map(block), EXTRAS[title]?.()) }));

function tagSection(tag, entries) {
  const list = () => entries.map(({ id, method, operation }) => [methodBadge(method), el("a", { href: `#${id}` }, operation.summary)]);
  return { id: `tag-${slug(tag.name)}`, title: tag.name, label: "Overview", group: tag.name, words: tag.description,
    draw: () => el("div.guide", null, markdown(tag.description), table(["Method", "Operation"], list(), "Operations")) };
}

const operationSection = (group) => (entry) => ({ id: entry.id, title: entry.operation.summary, group, method: entry.method,
  words: `${entry.path} ${entry.operation.description}`, draw: () => operationView(entry) });

const eventSections = () => Object.entries(spec.doc.webhooks).map(([name, item]) => ({ id: `event-${name}`, title: name,
  group: "Webhook events", words: item.post.description ?? "", draw: () => eventView(item) }));

/* All sections in the order of the menu. */
export function sections() {
  const entries = operations();
  const within = ({ name }) => entries.filter(({ operation }) => operation.tags.includes(name));
  const tagged = (tag) => [tagSection(tag, within(tag)), ...within(tag).map(operationSection(tag.name)),
    ...(tag.name === "Webhooks" ? eventSections() : [])];
  const types = { id: "types", title: "Types", group: "Guide", words: Object.keys(spec.doc.components.schemas).join(" "),
    draw: () => [el("p", null, "Named value types used throughout the API."), typeTable()] };
  return [...guideSections(), types, ...spec.doc.tags.flatMap(tagged)];
}
