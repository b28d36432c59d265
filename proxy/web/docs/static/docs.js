/*
 * Renders the OpenAPI document of this service as a readable reference. The document is the only source:
 * no path, scope or error is repeated here. All of its text becomes text nodes, never markup, so that a
 * description cannot run a script; the page's Content-Security-Policy enforces the same.
 */

const SOURCE = "/v1/openapi.json";
const METHODS = ["get", "post", "put", "patch", "delete"];
// A nested object with more fields starts collapsed, or it would push its siblings off the screen.
const MAX_OPEN_FIELDS = 8;
let doc = {};

/* --- DOM helpers --- */
function el(spec, attributes, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag);
  node.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(Boolean));
  return node;
}

const code = (value) => el("code", null, typeof value === "string" ? value : JSON.stringify(value));
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");
const spaced = (values) => values.flatMap((value) => [" ", code(value)]);

/* A collapsible section. Content given as a function is built on first open: every operation repeats the same errors. */
function collapsible(summary, content, open) {
  const isLazy = typeof content === "function";
  const inner = el("div.inside", null, isLazy ? open && content() : content);
  const node = el("details.collapsible", { open }, el("summary", null, summary), inner);
  if (isLazy && !open) node.addEventListener("toggle", () => inner.append(content()), { once: true });
  return node;
}

function table(heads, rows) {
  const line = (cells, tag) => el("tr", null, cells.map((cell) => el(tag, null, cell)));
  return el("div.scroll", null, el("table.plain", null,
    el("thead", null, line(heads, "th")), el("tbody", null, rows.map((row) => line(row, "td")))));
}

/* Replaces each match in a text by a node. */
function replaced(text, pattern, make) {
  const matches = [...text.matchAll(pattern)];
  const ends = [0, ...matches.map((match) => match.index + match[0].length)];
  return [...matches.flatMap((match, at) => [text.slice(ends[at], match.index), make(match)]), text.slice(ends.at(-1))];
}

/* --- Markdown: paragraphs, lists, tables, code, bold, links --- */
const INLINE = /`([^`]+)`|\*\*(.+?)\*\*|\[([^\]]+)\]\(((?:https?:\/\/|\/|#)[^\s)]*)\)/g;
const RULE = /^[\s|:-]*-[\s|:-]*$/;
const LIST = { ul: /^\s*[-*]\s+/, ol: /^\s*\d+\.\s+/ };
const inline = (text) => replaced(text ?? "", INLINE, ([, literal, bold, label, target]) => {
  if (literal) return code(literal);
  return bold ? el("strong", null, inline(bold)) : el("a", { href: target }, label);
});

function block(text) {
  const lines = text.split("\n");
  if (lines[0].includes("|") && RULE.test(lines[1] ?? "")) {
    const row = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
    return table(row(lines[0]), lines.slice(2).map(row));
  }
  const lead = lines.findIndex((line) => LIST.ul.test(line) || LIST.ol.test(line));
  if (lead > 0) return [block(lines.slice(0, lead).join("\n")), block(lines.slice(lead).join("\n"))];
  const kind = Object.keys(LIST).find((tag) => LIST[tag].test(text));
  if (!kind) return el("p", null, inline(lines.join(" ")));
  const items = text.split(/\n(?=\s*(?:[-*]|\d+\.)\s)/);
  return el(kind, null, items.map((item) => el("li", null, inline(item.replace(LIST[kind], "")))));
}

const blocks = (text) => (text ?? "").trim().split(/\n\s*\n/).filter(Boolean);
const markdown = (text) => blocks(text).map(block);

/* --- code with a copy button --- */
// In the output of JSON.stringify with an indent, a literal outside a string always follows white space.
const TOKEN = /("(?:\\.|[^"\\])*")(?=(\s*:)?)|(?<=^|\s)(-?\d[\d.eE+-]*|true|false|null)(?=[,\s']|$)/g;
const highlighted = (text) => replaced(text, TOKEN, ([whole, , isKey, literal]) =>
  el(literal ? "span.literal" : isKey ? "span.key" : "span.string", null, whole));

async function copy(target, button) {
  try {
    await navigator.clipboard.writeText(target.textContent);
  } catch {
    // The clipboard API is missing on plain HTTP.
    getSelection().selectAllChildren(target);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/* A code panel for the variants ({name, text}) of an example, with a select if there are several. */
function panel(label, variants) {
  if (!variants.length) return null;
  const target = el("code");
  const show = (index) => target.replaceChildren(...highlighted(variants[index].text));
  const button = el("button", { type: "button", "aria-live": "polite" }, "Copy");
  button.addEventListener("click", () => copy(target, button));
  const choice = el("select", { "aria-label": `${label}: example` },
    variants.map(({ name }, index) => el("option", { value: String(index) }, name)));
  choice.addEventListener("change", () => show(Number(choice.value)));
  show(0);
  return el("figure.panel", null,
    el("figcaption", null, el("span", null, label), variants.length > 1 && choice, button),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, target));
}

/* --- schemas --- */
const lookup = (ref) => ref.slice(2).split("/").reduce((node, key) => node?.[key], doc) ?? {};
const refName = (node) => node?.$ref?.split("/").pop();
const optionsOf = (schema) => schema.oneOf ?? schema.anyOf;
const isLeaf = (schema) => !schema.properties && !schema.items && !optionsOf(schema);
const valuesOf = (holder) => Object.values(holder.examples ?? {}).map((example) => example.value);

/* Keywords beside a $ref add to its target (JSON Schema 2020-12); annotations override it. */
function resolve(node) {
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
function typeLine(node) {
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

/* The constraints of a value. Length and pattern of a named type are left to the list of types. */
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
    own.pattern && ["matches ", code(own.pattern)],
    useful.length > 0 && !schema.enum && ["for example", spaced(useful)],
  ];
}

/* --- field tables: a brief one shows only the first sentence of a named type; the list of types has the rest --- */
function description(node, isBrief) {
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
function shape(node, trail, isBrief) {
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

const valueTable = (label, values) => fieldTable(label, values.map((value) => fieldRow({
  ...value, tag: value.in, node: { ...value.schema, description: value.description },
  examples: [value.example ?? null, ...valuesOf(value)] })));

/* --- request bodies and responses --- */
function examplesOf(media) {
  const given = Object.entries(media.examples ?? {});
  if (given.length) return given.map(([key, { summary, value }]) => ({ key, name: summary ?? key, value }));
  return (resolve(media.schema).examples ?? []).map((value, at) => ({ name: `Example ${at + 1}`, value }));
}

const body = (media, isBrief) =>
  [el("p.body", null, typeLine(media.schema)), description(media.schema), shape(media.schema, [], isBrief)];
const bodyPanel = (media, label) =>
  panel(label, examplesOf(media).map(({ name, value }) => ({ name, text: JSON.stringify(value, null, 2) })));
const pair = (left, right) => el("div.pair", null, el("div.text", null, left), right && el("div.sample", null, right));

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
  const part = (label, node) => [el("h5", null, `${label} `, typeLine(node)), description(node), shape(node, [], true)];
  return collapsible(code(name), [params.map((param, at) => part(`Param ${at + 1}`, param)), part("Result", result)]);
}

/* --- curl --- */
/* Prefers the example with the same name as the body's, so that a Solana call goes to a Solana network. */
function exampleValue(parameter, key) {
  const schema = resolve(parameter.schema);
  const own = parameter.examples?.[key]?.value ?? valuesOf(parameter)[0] ?? parameter.example;
  return own ?? schema.examples?.[0] ?? schema.default;
}

const server = () => new URL(doc.servers?.[0]?.url ?? "/", location.origin).href.replace(/\/$/, "");
const needsKey = (operation) => (operation.security ?? doc.security ?? []).some((way) => Object.keys(way).length > 0);
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function exampleUrl({ path, parameters }, key) {
  const values = new Map(parameters.map((parameter) => [parameter.name, exampleValue(parameter, key)]));
  const filled = path.replace(/\{(\w+)\}/g, (whole, name) => encodeURIComponent(values.get(name) ?? name));
  const isUseful = ({ name, schema }) => ![undefined, resolve(schema).default].includes(values.get(name));
  const queried = parameters.filter((parameter) => parameter.in === "query" && isUseful(parameter));
  const query = new URLSearchParams(queried.map(({ name }) => [name, values.get(name)])).toString();
  return server() + filled + (query && `?${query}`);
}

function curl(entry, example) {
  const verb = entry.method === "get" ? "curl" : `curl -X ${entry.method.toUpperCase()}`;
  return [`${verb} ${quoted(exampleUrl(entry, example?.key))}`,
    needsKey(entry.operation) && '-H "X-API-Key: $API_KEY"',
    example && "-H 'Content-Type: application/json'",
    example && `-d ${quoted(JSON.stringify(example.value, null, 2))}`].filter(Boolean).join(" \\\n  ");
}

/* --- operations --- */
function operations() {
  const each = (path, item) => ([method, operation]) => ({ method, path, operation, id: operation.operationId,
    parameters: [...(item.parameters ?? []), ...(operation.parameters ?? [])].map(resolve) });
  const calls = (item) => Object.entries(item).filter(([key]) => METHODS.includes(key));
  return Object.entries(doc.paths).flatMap(([path, item]) => calls(item).map(each(path, item)));
}

const statusBadge = (status) => el(`span.status.s${status[0]}`, null, status);
const methodBadge = (method) => el(`span.method.${method}`, null, method.toUpperCase());
const anchor = (id) => el("a.anchor", { href: `#${id}`, "aria-label": "Link to this section" }, "#");

function pathLine({ method, path }) {
  const parts = (new URL(server()).pathname + path).split(/(\{\w+\}|\/)/);
  return el("p.path", null, methodBadge(method), el("code", null,
    parts.map((part) => (part === "/" ? [el("wbr"), part] : part[0] === "{" ? el("var", null, part) : part))));
}

function operationArticle(entry) {
  const { operation, parameters, id } = entry;
  const [media] = Object.values(operation.requestBody?.content ?? {});
  const calls = media ? examplesOf(media) : [];
  const shell = (calls.length ? calls : [undefined]).map((call) => ({ name: call?.name, text: curl(entry, call) }));
  const methods = operation["x-rpc-methods"];
  const scope = operation["x-scope"] && ["Scope ", code(operation["x-scope"])];
  return el("article.op", { id, "data-section": true },
    el("h3", null, operation.summary, anchor(id)),
    pathLine(entry),
    pair([markdown(operation.description),
      el("p.scope", null, needsKey(operation) ? scope : "No API key required"),
      parameters.length > 0 && [el("h4", null, "Parameters"), valueTable("Parameters", parameters)],
      media && [el("h4", null, "Request body"), body(media, false)]],
    [panel("curl", shell), media && bodyPanel(media, "Request body")]),
    methods && [el("h4", null, "Methods"), el("div.list", null, Object.entries(methods).map(methodSection))],
    el("h4", null, "Responses"), el("div.list", null, Object.entries(operation.responses).map(responseSection)));
}

/* --- guide: the document's introduction, split at its run-in headings --- */
function guide() {
  const parts = [{ title: "Overview", texts: [] }];
  for (const text of blocks(doc.info.description)) {
    const [lead, title] = text.match(/^\*\*([^*]+?)\.?\*\*\s+/) ?? [""];
    if (title) parts.push({ title, texts: [] });
    parts.at(-1).texts.push(text.slice(lead.length));
  }
  return parts;
}

function schemeHeader({ type, name, in: place }) {
  if (type !== "apiKey") return "Authorization: Bearer …";
  return place === "cookie" ? `Cookie: ${name}=…` : `${name}: …`;
}

const schemeTable = () => table(["Header", "Meaning"], Object.values(doc.components.securitySchemes).map((scheme) =>
  [code(schemeHeader(scheme)), inline(scheme.description)]));

function errorTable() {
  const all = operations().flatMap(({ operation }) => Object.entries(operation.responses));
  const found = new Map(all.filter(([status]) => status >= "400").map(([status, node]) => [status, resolve(node)]));
  const codes = (reply) => new Set(Object.values(reply.content ?? {}).flatMap(valuesOf).map((value) => value.error?.code));
  return table(["Status", "Code", "Meaning"], [...found].sort(([one], [other]) => one - other).map(([status, reply]) =>
    [statusBadge(status), spaced([...codes(reply)]), inline(reply.description)]));
}

const typeTable = () => fieldTable("Types", Object.entries(doc.components.schemas)
  .filter(([, schema]) => isLeaf(schema)).map(([name, node]) => fieldRow({ name, node, id: `type-${name}` })));
const facts = () => el("p.facts", null,
  el("span", null, "Base URL ", code(server())), el("a", { href: SOURCE }, "OpenAPI document"));
const section = (title, content) => el("section.guide", { id: slug(title), "data-section": true },
  el("h2", null, title, anchor(slug(title))), content);

/* --- page --- */
const navGroup = (title, links) => el("section", null, el("h2", null, title),
  el("ul", null, links.map((link) => el("li", null, link))));
const plainLink = (title) => el("a", { href: `#${slug(title)}` }, title);
const operationLink = ({ id, method, operation }) => el("a", { href: `#${id}` },
  methodBadge(method), el("span", null, operation.summary));

function draw() {
  const entries = operations();
  const within = ({ name }) => entries.filter(({ operation }) => operation.tags.includes(name));
  const tags = doc.tags.map((tag) => ({ ...tag, entries: within(tag) }));
  const extras = { Overview: facts, Authentication: schemeTable, Errors: errorTable };
  const parts = guide();
  document.getElementById("content").replaceChildren(
    el("h1", null, `${doc.info.title} API`),
    ...parts.map(({ title, texts }) => section(title, [texts.map(block), extras[title]?.()])),
    ...tags.map((tag) => el("section.group", null,
      el("h2", null, tag.name), markdown(tag.description), tag.entries.map(operationArticle))),
    section("Types", [el("p", null, "Named value types used throughout the API."), typeTable()]));
  document.getElementById("links").replaceChildren(
    navGroup("Guide", [...parts.map(({ title }) => title), "Types"].map(plainLink)),
    ...tags.map((tag) => navGroup(tag.name, tag.entries.map(operationLink))));
  document.getElementById("version").textContent = doc.info.version;
}

/* Highlights the section in view in the sidebar. */
function watchScroll() {
  const observer = new IntersectionObserver((seen) => {
    const top = seen.find((one) => one.isIntersecting)?.target;
    const link = top && document.querySelector(`#links a[href="#${top.id}"]`);
    if (!link) return;
    document.querySelector("#links [aria-current]")?.removeAttribute("aria-current");
    link.setAttribute("aria-current", "true");
    link.scrollIntoView({ block: "nearest" });
  }, { rootMargin: "-12% 0px -84% 0px" });
  document.querySelectorAll("[data-section]").forEach((node) => observer.observe(node));
}

function wireMenu() {
  const menu = document.getElementById("menu");
  const setOpen = (isOpen) => menu.setAttribute("aria-expanded", String(isOpen));
  menu.addEventListener("click", () => setOpen(menu.getAttribute("aria-expanded") === "false"));
  document.getElementById("links").addEventListener("click", (event) => setOpen(!event.target.closest("a")));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") setOpen(false); });
}

async function start() {
  const reply = await fetch(SOURCE);
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  doc = await reply.json();
  draw();
  wireMenu();
  watchScroll();
  // The browser looked for the target of a deep link before it existed.
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

start().catch((error) => document.getElementById("content").replaceChildren(
  el("p.loading", { role: "alert" }, `Could not load the reference from ${SOURCE}: ${error.message}.`)));
