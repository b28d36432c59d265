/* Forms: fields with labels and hints, and what happens when one is sent. Each field has `node`, `read` and, if it can be set, `write`. */

import { el, put } from "./dom.js";
import { note } from "./components.js";

let serial = 0;

/* The label above, the hint below, tied together for those who do not see it. */
function labelled(label, control, hint) {
  control.id ||= `field-${++serial}`;
  if (hint) control.setAttribute("aria-describedby", `${control.id}-hint`);
  return el("div.field", null,
    el("label", { for: control.id }, label), control, hint && el("p.hint", { id: `${control.id}-hint` }, hint));
}

function field(label, control, hint, read = () => control.value.trim()) {
  return { node: labelled(label, control, hint), control, read, write: (value) => { control.value = value ?? ""; } };
}

export const text = (label, { hint, value, ...attributes } = {}) =>
  field(label, el("input", { type: "text", autocomplete: "off", spellcheck: "false", value: value ?? "", ...attributes }), hint);

export const password = (label, options = {}) => {
  const made = text(label, { type: "password", ...options });
  return { ...made, read: () => made.control.value };
};

/* A whole number, or null when left empty. */
export function count(label, { hint, ...attributes } = {}) {
  const made = text(label, { hint, type: "number", inputmode: "numeric", min: "0", step: "1", ...attributes });
  return { ...made, read: () => (made.control.value === "" ? null : Number(made.control.value)) };
}

export const lines = (label, { hint, value, rows = 3, ...attributes } = {}) =>
  field(label, el("textarea", { rows: String(rows), spellcheck: "false", autocomplete: "off", value: value ?? "", ...attributes }), hint);

/* JSON in a text area; reading what is none throws, with a message for people. */
export function json(label, { value, ...options } = {}) {
  const made = lines(label, { rows: 6, class: "mono", ...options, value: value === undefined ? "" : JSON.stringify(value, null, 2) });
  const read = () => {
    const given = made.control.value.trim();
    try {
      return given ? JSON.parse(given) : undefined;
    } catch (failure) {
      throw new Error(`${label}: this is not JSON (${failure.message})`);
    }
  };
  return { ...made, read, write: (next) => { made.control.value = next === undefined ? "" : JSON.stringify(next, null, 2); } };
}

/* Options: {value: label}, or {group: {value: label}}. */
export function select(label, options, { hint, value, ...attributes } = {}) {
  const entry = ([key, shown]) => (typeof shown === "object"
    ? el("optgroup", { label: key }, Object.entries(shown).map(entry))
    : el("option", { value: key }, shown));
  const control = el("select", attributes, Object.entries(options).map(entry));
  if (value !== undefined) control.value = value;
  return field(label, control, hint, () => control.value);
}

/* A text with suggestions: whatever is typed is taken. */
export function suggest(label, values, { hint, ...attributes } = {}) {
  const made = text(label, { hint, ...attributes });
  const list = el("datalist", { id: `${made.control.id}-list` }, values.map((value) => el("option", { value })));
  made.control.setAttribute("list", list.id);
  made.node.append(list);
  return { ...made, offer: (next) => put(list, next.map((value) => el("option", { value }))) };
}

/* Some of several. */
export function checks(label, options, chosen) {
  const boxes = Object.entries(options).map(([value, shown]) => {
    const box = el("input", { type: "checkbox", value, id: `field-${++serial}` });
    box.checked = chosen.includes(value);
    return { box, node: el("div.check", null, box, el("label", { for: box.id }, shown)) };
  });
  return {
    node: el("fieldset", null, el("legend", null, label), el("div.checks", null, boxes.map(({ node }) => node))),
    read: () => boxes.filter(({ box }) => box.checked).map(({ box }) => box.value),
  };
}

/* A form around fields. `send` does the work; its failure is told above the buttons, and nothing that was typed is lost. */
export function form(inside, { label, send, cancel, kind = "main" }) {
  const problem = el("div.problem");
  const go = el(`button${kind && `.${kind}`}`, { type: "submit" }, label);
  const onsubmit = async (event) => {
    event.preventDefault();
    go.disabled = true;
    put(problem);
    try {
      await send();
    } catch (failure) {
      put(problem, note(failure.message));
    } finally {
      go.disabled = false;
    }
  };
  return el("form", { onsubmit }, inside, problem,
    el("div.actions", null, cancel && el("button", { type: "button", onclick: cancel }, "Cancel"), go));
}

export const row = (...fields) => el("div.row", null, fields);
