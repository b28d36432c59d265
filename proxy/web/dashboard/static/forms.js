/* Form fields with labels and hints, and form submission. A field has `node`, `read()` and, if it can be set, `write(value)`. */

import { el, setChildren } from "./dom.js";
import { note } from "./components.js";
import * as format from "./format.js";

let serial = 0;

/* A label above the control and a hint below, linked for screen readers. */
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
  const base = text(label, { type: "password", ...options });
  return { ...base, read: () => base.control.value };
};

/* A whole number, or null if empty. */
export function count(label, { hint, ...attributes } = {}) {
  const base = text(label, { hint, type: "number", inputmode: "numeric", min: "0", step: "1", ...attributes });
  return { ...base, read: () => (base.control.value === "" ? null : Number(base.control.value)) };
}

export const lines = (label, { hint, value, rows = 3, ...attributes } = {}) =>
  field(label, el("textarea", { rows: String(rows), spellcheck: "false", autocomplete: "off", value: value ?? "", ...attributes }), hint);

/* JSON in a text area. `read` throws a readable error if the text is not valid JSON. */
export function json(label, { value, ...options } = {}) {
  const base = lines(label, { rows: 6, class: "mono", ...options, value: value === undefined ? "" : JSON.stringify(value, null, 2) });
  const read = () => {
    const typed = base.control.value.trim();
    try {
      return typed ? JSON.parse(typed) : undefined;
    } catch (failure) {
      throw new Error(`${label} is not valid JSON: ${failure.message}`);
    }
  };
  return { ...base, read, write: (next) => { base.control.value = next === undefined ? "" : JSON.stringify(next, null, 2); } };
}

/* Options are {value: label} or {group: {value: label}}. */
export function select(label, options, { hint, value, ...attributes } = {}) {
  const entry = ([key, shown]) => (typeof shown === "object"
    ? el("optgroup", { label: key }, Object.entries(shown).map(entry))
    : el("option", { value: key }, shown));
  const control = el("select", attributes, Object.entries(options).map(entry));
  if (value !== undefined) control.value = value;
  return field(label, control, hint, () => control.value);
}

/* A text field with suggestions; any other text is accepted too. */
export function suggest(label, values, { hint, ...attributes } = {}) {
  const base = text(label, { hint, ...attributes });
  const list = el("datalist", { id: `${base.control.id}-list` }, values.map((value) => el("option", { value })));
  base.control.setAttribute("list", list.id);
  base.node.append(list);
  return { ...base, setSuggestions: (next) => setChildren(list, next.map((value) => el("option", { value }))) };
}

/* A group of checkboxes, with a hint below. */
export function checks(label, options, chosen, { hint } = {}) {
  const boxes = Object.entries(options).map(([value, shown]) => {
    const box = el("input", { type: "checkbox", value, id: `field-${++serial}` });
    box.checked = chosen.includes(value);
    return { box, node: el("div.check", null, box, el("label", { for: box.id }, shown)) };
  });
  return {
    node: el("fieldset", null, el("legend", null, label), el("div.checks", null, boxes.map(({ node }) => node)), hint && el("p.hint", null, hint)),
    read: () => boxes.filter(({ box }) => box.checked).map(({ box }) => box.value),
    write: (values) => { for (const { box } of boxes) box.checked = values.includes(box.value); },
  };
}

/* A group of radio buttons, each with a sentence: options are {value: [label, sentence]}. `disable` takes the values that cannot be chosen; `pick` gets the one that was. */
export function choice(label, options, chosen, pick = () => {}) {
  const group = `choice-${++serial}`;
  const buttons = Object.entries(options).map(([value, [shown, sentence]]) => {
    const box = el("input", { type: "radio", name: group, value, id: `field-${++serial}`, "aria-describedby": `${group}-${value}` });
    box.checked = value === chosen;
    box.addEventListener("change", () => pick(value));
    return { box, node: el("div.check", null, box, el("div", null, el("label", { for: box.id }, shown), el("p.hint", { id: `${group}-${value}` }, sentence))) };
  });
  const disable = (values) => {
    for (const { box } of buttons) box.disabled = values.includes(box.value);
    const kept = buttons.find(({ box }) => box.checked && !box.disabled) ?? buttons.find(({ box }) => !box.disabled);
    kept.box.checked = true;
  };
  return {
    node: el("fieldset", null, el("legend", null, label), el("div.choices", null, buttons.map(({ node }) => node))),
    read: () => buttons.find(({ box }) => box.checked).box.value,
    disable,
  };
}

/* The label of a parameter of the API: that of the form's `labels`, of the control that has the same words, or its own words. */
function labelOf(param, labels) {
  const words = param.split(".").filter((part) => !/^\d+$/.test(part));
  return labels[words.at(-1)] ?? labels[words[0]] ?? format.label(words.at(-1) ?? param);
}

/* What is wrong, by the labels of the controls, which are marked. */
function problemsOf(node, { errors = [], message }, labels) {
  const controls = new Map([...node.querySelectorAll("label")].map((each) => [each.textContent.toLowerCase(), node.querySelector(`[id="${each.htmlFor}"]`)]));
  const found = errors.map(({ param, message: text }) => {
    const label = labelOf(param, labels);
    controls.get(label.toLowerCase())?.setAttribute("aria-invalid", "true");
    return text.startsWith(`${param}: `) ? `${label}: ${text.slice(param.length + 2)}` : text;
  });
  return note(found.length > 1 ? el("ul", null, found.map((text) => el("li", null, text))) : found[0] ?? message);
}

/*
 * A form around fields. If `send` fails, all errors appear above the buttons and the fields keep their values. `isInline`: with the
 * button beside them. `labels`: the labels of parameters of the API that do not have the same words.
 */
export function form(fields, { label, send, cancel, kind = "main", isInline = false, labels = {} }) {
  const problem = el("div.problem");
  const submit = el(`button${kind && `.${kind}`}`, { type: "submit" }, label);
  const onsubmit = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    setChildren(problem);
    for (const each of node.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
    try {
      await send();
    } catch (failure) {
      setChildren(problem, problemsOf(node, failure, labels));
    } finally {
      submit.disabled = false;
    }
  };
  const node = el(`form${isInline ? ".inline" : ""}`, { onsubmit }, fields, problem,
    el("div.actions", null, cancel && el("button", { type: "button", onclick: cancel }, "Cancel"), submit));
  return node;
}

export const row = (...fields) => el("div.row", null, fields);
