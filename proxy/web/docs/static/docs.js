/*
 * Renders the OpenAPI document of this service as a readable reference, one section at a time. The document is the only
 * source: no path, scope or error is repeated here. The page's Content-Security-Policy forbids markup from text.
 */

import { el } from "./dom.js";
import { spec } from "./schema.js";
import { methodBadge, sections } from "./views.js";

const SOURCE = "/v1/openapi.json";
const byId = (id) => document.getElementById(id);
let all = [];

/* --- menu and search --- */
const link = ({ id, title, label, method }) =>
  el("a", { href: `#${id}` }, method && methodBadge(method), el("span", null, label ?? title));

function menu(shown) {
  const groups = [...new Set(shown.map(({ group }) => group))];
  return groups.map((group) => el("section", null, el("h2", null, group),
    el("ul", null, shown.filter((each) => each.group === group).map((each) => el("li", null, link(each))))));
}

/* Every word must occur; sections with one in the title or the path come first. */
function found(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (text) => words.every((word) => text.toLowerCase().includes(word));
  const title = ({ title, id, group }) => `${title} ${id} ${group}`;
  const matching = all.filter((each) => has(`${title(each)} ${each.words}`));
  return [...matching.filter((each) => has(title(each))), ...matching.filter((each) => !has(title(each)))];
}

function drawMenu() {
  const query = byId("search").value.trim();
  const results = query ? found(query) : all;
  byId("links").replaceChildren(...menu(results));
  byId("found").textContent = query && `${results.length} section${results.length === 1 ? "" : "s"} found`;
  mark();
}

/* Marks the section that is shown in the menu. */
function mark() {
  byId("links").querySelector("[aria-current]")?.removeAttribute("aria-current");
  const current = byId("links").querySelector(`a[href="#${CSS.escape(shown().id)}"]`);
  current?.setAttribute("aria-current", "page");
  current?.scrollIntoView({ block: "nearest" });
}

/* --- sections --- */
const hash = () => decodeURIComponent(location.hash.slice(1));
// A deep link to a type opens the list of types.
const shown = () => all.find(({ id }) => id === hash()) ?? all.find(({ id }) => hash().startsWith("type-") && id === "types") ?? all[0];

function neighbours(section) {
  const at = all.indexOf(section);
  const step = (to, label) => to && el("a", { href: `#${to.id}` }, el("span.hint", null, label), to.title);
  return el("nav.steps", { "aria-label": "Sections" }, step(all[at - 1], "Previous"), step(all[at + 1], "Next"));
}

function drawSection({ isFirst } = {}) {
  const section = shown();
  const isHome = section === all[0];
  const title = isHome ? `${spec.doc.info.title} API` : section.title;
  byId("content").replaceChildren(el("h1", { tabindex: "-1" }, title), ...[section.draw()].flat(Infinity).filter(Boolean), neighbours(section));
  document.title = isHome ? "Penstock API reference" : `${title} · Penstock API reference`;
  mark();
  const target = byId(hash());
  if (target && target !== byId("content")) target.scrollIntoView();
  else if (!isFirst) scrollTo(0, 0);
  if (!isFirst) byId("content").querySelector("h1").focus({ preventScroll: true });
}

function wire() {
  const button = byId("menu");
  const setOpen = (isOpen) => button.setAttribute("aria-expanded", String(isOpen));
  button.addEventListener("click", () => setOpen(button.getAttribute("aria-expanded") === "false"));
  byId("links").addEventListener("click", (event) => event.target.closest("a") && setOpen(false));
  byId("search").addEventListener("input", drawMenu);
  byId("search-form").addEventListener("submit", (event) => event.preventDefault());
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") byId("links").querySelector("a")?.click();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") setOpen(false);
    if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    byId("search").focus();
  });
  addEventListener("hashchange", () => { if (hash() !== "content") drawSection(); });
}

async function start() {
  const reply = await fetch(SOURCE);
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  spec.doc = await reply.json();
  byId("version").textContent = spec.doc.info.version;
  all = sections();
  drawSection({ isFirst: true });
  drawMenu();
  wire();
}

start().catch((error) => byId("content").replaceChildren(
  el("p.loading", { role: "alert" }, `Could not load the reference from ${SOURCE}: ${error.message}.`)));
