/* Elements, Markdown and code panels. Text becomes text nodes, never markup, so that a description cannot run a script. */

export function el(spec, attributes, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag);
  node.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return node;
}

export const code = (value) => el("code", null, typeof value === "string" ? value : JSON.stringify(value));
export const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");
export const spaced = (values) => values.flatMap((value) => [" ", code(value)]);

/* A collapsible section. Content given as a function is built on first open: every operation repeats the same errors. */
export function collapsible(summary, content, open) {
  const isLazy = typeof content === "function";
  const inner = el("div.inside", null, isLazy ? open && content() : content);
  const node = el("details.collapsible", { open }, el("summary", null, summary), inner);
  if (isLazy && !open) node.addEventListener("toggle", () => inner.append(content()), { once: true });
  return node;
}

/* Scrollable, so it takes the focus: the keyboard must reach what is out of sight. */
export function table(heads, rows, label) {
  const line = (cells, tag) => el("tr", null, cells.map((cell) => el(cell.length === 0 ? "td" : tag, null, cell)));
  const name = label ?? `Table: ${heads.map((head) => el("i", null, head).textContent).filter(Boolean).join(", ")}`;
  return el("div.scroll", { tabindex: "0", role: "region", "aria-label": name }, el("table.plain", null,
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
export const inline = (text) => replaced(text ?? "", INLINE, ([, literal, bold, label, target]) => {
  if (literal) return code(literal);
  return bold ? el("strong", null, inline(bold)) : el("a", { href: target }, label);
});

export function block(text) {
  const lines = text.split("\n");
  if (lines[0].includes("|") && RULE.test(lines[1] ?? "")) {
    const row = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => (cell.trim() ? inline(cell.trim()) : ""));
    return table(row(lines[0]), lines.slice(2).map(row));
  }
  const lead = lines.findIndex((line) => LIST.ul.test(line) || LIST.ol.test(line));
  if (lead > 0) return [block(lines.slice(0, lead).join("\n")), block(lines.slice(lead).join("\n"))];
  const kind = Object.keys(LIST).find((tag) => LIST[tag].test(text));
  if (!kind) return el("p", null, inline(lines.join(" ")));
  const items = text.split(/\n(?=\s*(?:[-*]|\d+\.)\s)/);
  return el(kind, null, items.map((item) => el("li", null, inline(item.replace(LIST[kind], "")))));
}

export const blocks = (text) => (text ?? "").trim().split(/\n\s*\n/).filter(Boolean);
export const markdown = (text) => blocks(text).map(block);

/* --- code with a copy button --- */
// In the output of JSON.stringify with an indent, a literal outside a string always follows white space.
const TOKEN = /("(?:\\.|[^"\\\n])*")(?=(\s*:)?)|(?<=^|\s)(-?\d[\d.eE+-]*|true|false|null)(?=[,\s']|$)/g;
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

// The language chosen last, for the next panel too.
let chosen = "";

/* Buttons for the languages of a panel. */
function languageButtons(languages, show) {
  const press = (name) => {
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.textContent === name));
    show(name);
  };
  const buttons = languages.map((name) => el("button", { type: "button" }, name));
  for (const each of buttons) each.addEventListener("click", () => press(chosen = each.textContent));
  press(languages.includes(chosen) ? chosen : languages[0]);
  return el("div.languages", { role: "group", "aria-label": "Language" }, buttons);
}

/* A code panel. `variants`: {name, texts}, the text of each in every language; one language needs no buttons. */
export function panel(label, variants) {
  if (!variants.length) return null;
  const target = el("code");
  const languages = Object.keys(variants[0].texts);
  let [index, language] = [0, languages[0]];
  const show = () => target.replaceChildren(...highlighted(variants[index].texts[language] ?? ""));
  const button = el("button.copy", { type: "button", "aria-live": "polite" }, "Copy");
  button.addEventListener("click", () => copy(target, button));
  const choice = el("select", { "aria-label": `${label}: example` },
    variants.map(({ name }, at) => el("option", { value: String(at) }, name)));
  choice.addEventListener("change", () => { index = Number(choice.value); show(); });
  show();
  const tabs = languages.length > 1 && languageButtons(languages, (name) => { language = name; show(); });
  return el("figure.panel", null,
    el("figcaption", null, tabs || el("span", null, label), variants.length > 1 && choice, button),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, target));
}
