/* Shared components: buttons, badges, tables, loading and empty states, toasts, dialogs. */

import { el, refreshChildren, setChildren } from "./dom.js";
import * as format from "./format.js";

const TONES = {
  active: "good", delivered: "good", up: "good", answered: "good", live: "live", closed: "good",
  paused: "wait", pending: "wait", starting: "wait", held: "wait", parked: "wait", slow: "wait", lagging: "wait", resting: "wait",
  half_open: "wait", catching_up: "wait", expiring: "wait", cordoned: "wait", waiting: "wait", on_trial: "wait",
  disabled: "bad", revoked: "off", failed: "bad", open: "bad", silent: "bad",
  wrong_chain: "bad", wrong_version: "bad", forked: "bad", ahead: "bad", unchecked: "wait", stopped: "bad", expired: "off",
};

export const badge = (status, tone = TONES[status] ?? "off") => tag(format.label(status), tone);

const tag = (text, tone) => el(`span.badge.${tone}`, null, text);

/* The outcome of a request. A call that fails on the chain gets a JSON-RPC error with the status 200. */
export function outcome(status, hasFailed) {
  if (hasFailed && status < 400) return tag("JSON-RPC error", "bad");
  return tag(hasFailed ? `HTTP ${status}` : String(status), hasFailed ? "bad" : "good");
}

// The API's name for methods that it does not know.
const UNKNOWN = "other";

/* `called`: the name that the caller gave to a method that does not exist. */
export const methodName = (name, called) => (name === UNKNOWN ? (called ? el("code", { title: "Unknown method" }, called) : "Unknown method") : el("code", null, name || format.NONE));

export function button(label, onclick, { kind = "", ...attributes } = {}) {
  return el(`button${kind && `.${kind}`}`, { type: "button", onclick, ...attributes }, label);
}

/* A button that is disabled while its action runs and shows a toast if the action fails. */
export function asyncButton(label, action, options = {}) {
  const node = button(label, async () => {
    node.disabled = true;
    try {
      await action();
    } catch (failure) {
      toast(failure.message, "bad");
    } finally {
      node.disabled = false;
    }
  }, options);
  return node;
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API is missing on plain HTTP. While a modal dialog is open, only nodes inside it can be selected.
    const area = el("textarea", { value: text, readonly: true, class: "visually-hidden" });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function copyButton(text, label = "Copy", attributes = {}) {
  const node = button(label, async () => {
    await copyText(typeof text === "function" ? text() : text);
    node.textContent = "Copied";
    setTimeout(() => { node.textContent = label; }, 1500);
  }, { kind: "small", "aria-live": "polite", ...attributes });
  return node;
}

// Characters of an id that are shown whatever happens: they tell it from others.
const END = 6;

/* An id in one line. Where it is too long, its middle is cut off; it is still copied whole. */
export const idText = (text) => el("code.cut", { title: text }, el("span", null, text.slice(0, -END)), text.slice(-END));

/* An id with a button that copies it. */
export const idField = (text) => el("span.id", null, idText(text), copyButton(text, "Copy", { "aria-label": `Copy ${text}` }));

export function secretField(text, label) {
  const shown = el("code.secret", { tabindex: "0", "aria-label": label }, text);
  return el("div.reveal", null, shown, copyButton(text));
}

export function codeBlock(label, text) {
  const inside = el("code", null, text);
  const node = el("figure.code", null,
    el("figcaption", null, el("span", null, label), copyButton(() => inside.textContent)),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, inside));
  return { node, show: (next) => setChildren(inside, next) };
}

/* --- layout --- */

export const heading = (title, { lead, actions } = {}) => el("header.top", null,
  el("div", null, el("h1", { tabindex: "-1" }, title), lead && el("p.lead", null, lead)),
  actions && el("div.actions", null, actions));

export const card = (title, ...inside) => el("section.card", null,
  title && el("h2", null, title), ...inside);

export const facts = (pairs) => el("dl.facts", null, pairs.filter(Boolean).map(([name, value]) =>
  el("div", null, el("dt", null, name), el("dd", null, value))));

/* A figure with its name, and a remark below. */
export const tile = (name, figure, below) => el("div.tile", null, el("span.name", null, name), el("span.figure", null, figure), el("span.below", null, below));

/* A time, in one line. */
export const moment = (iso) => el("time", { datetime: iso }, format.time(iso));

/* --- loading, empty and error states --- */

export const skeleton = (lines = 3) => el("div.skeleton", { role: "status", "aria-label": "Loading" },
  Array.from({ length: lines }, () => el("span.line")));

export const empty = (title, text, ...actions) => el("div.empty", null,
  el("p.title", null, title), text && el("p", null, text), actions.length > 0 && el("div.actions", null, actions));

export const note = (text, tone = "bad") => el(`div.note.${tone}`, { role: tone === "bad" ? "alert" : "status" }, text);

export const loadError = (failure, reload) => el("div.empty", { role: "alert" },
  el("p.title", null, failure.status === 404 ? "Not found" : "Could not load this page"),
  el("p", null, failure.message), reload && el("div.actions", null, button("Try again", reload)));

/*
 * A region that shows a skeleton, then the nodes that `load` returns, or an error. `reload` keeps the old content until the new one is
 * there. If loads overlap, the last one started wins.
 */
export function asyncRegion(load, lines) {
  const node = el("div", null, skeleton(lines));
  let newest = 0;
  const reload = async () => {
    const number = ++newest;
    const content = await load().catch((failure) => loadError(failure, reload));
    if (number === newest) refreshChildren(node, content);
  };
  return { node, reload, ready: reload() };
}

/*
 * Calls `work` while the node is in the page and the page is visible. `work` may return the seconds until the next call; failures back
 * off up to 30 seconds.
 */
export function poll(node, seconds, work) {
  let delay = seconds;
  const tick = async () => {
    if (!node.isConnected) return;
    if (!document.hidden) {
      try {
        delay = (await work()) ?? seconds;
      } catch {
        delay = Math.min(30, delay * 2);
      }
    }
    setTimeout(tick, delay * 1000);
  };
  setTimeout(tick, seconds * 1000);
}

/* --- tables: on narrow screens each row becomes a card whose cells are labelled by `data-label` --- */

/* `isDense`: each row is one line; longer cells are cut off. */
export function table(caption, columns, rows, { isDense = false } = {}) {
  const present = columns.filter(Boolean);
  const line = (row) => el("tr", row?.attributes, present.map((column, at) => {
    const shown = column.show(row?.data ?? row);
    const value = Array.isArray(shown) && column.kind !== "row-actions" ? el("div", null, shown) : shown;
    const tag = at === 0 ? "th" : "td";
    return el(tag + (column.kind ? `.${column.kind}` : ""), { scope: at === 0 ? "row" : undefined, "data-label": column.name }, value);
  }));
  return el("div.scroll", null, el(isDense ? "table.dense" : "table", null, el("caption.visually-hidden", null, caption),
    el("thead", null, el("tr", null, present.map(({ name, below, kind }) =>
      el(`th${kind ? `.${kind}` : ""}`, { scope: "col" }, kind === "row-actions" ? el("span.visually-hidden", null, name) : name, below && el("span.below", null, below))))),
    el("tbody", null, rows.map(line))));
}

export function pager({ page, total, limit }, go) {
  const pages = Math.max(1, Math.ceil(total / limit));
  if (pages === 1) return null;
  return el("nav.pager", { "aria-label": "Pagination" },
    button("Previous", () => go(page - 1), { kind: "small", disabled: page <= 1 }),
    el("span", null, `Page ${page} of ${format.number(pages)}`),
    button("Next", () => go(page + 1), { kind: "small", disabled: page >= pages }));
}

/* A segmented control: a row of buttons, one of them pressed. */
export function segmentedControl(label, options, chosen, pick) {
  const buttons = Object.entries(options).map(([value, text]) => button(text, () => {
    for (const each of buttons) each.setAttribute("aria-pressed", each.dataset.value === value);
    pick(value);
  }, { "data-value": value, "aria-pressed": String(value === chosen) }));
  return el("div.segmented", { role: "group", "aria-label": label }, buttons);
}

/* --- toasts --- */

export function toast(text, tone = "good") {
  const node = el(`p.toast.${tone}`, null, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), tone === "bad" ? 8000 : 4000);
}

/* --- dialogs --- */

/* A modal dialog. The browser traps the focus, restores it afterwards, and closes the dialog on Escape. The first field is focused. */
export function dialog(title, build, { staysOnOtherPages = false } = {}) {
  const node = el("dialog", { "aria-labelledby": "dialog-title" });
  const close = () => node.close();
  setChildren(node, el("div.inside", null,
    el("header", null, el("h2", { id: "dialog-title" }, title), button("×", close, { kind: "quiet", "aria-label": "Close" })),
    build(close)));
  if (!staysOnOtherPages) addEventListener("hashchange", close);
  node.addEventListener("close", () => {
    removeEventListener("hashchange", close);
    node.remove();
  });
  document.body.append(node);
  if (!document.querySelector("dialog:modal")) {
    document.documentElement.style.setProperty("--scrollbar", `${innerWidth - document.body.offsetWidth}px`);
  }
  node.showModal();
  node.querySelector("form :is(input, select, textarea)")?.focus();
  return node;
}

/* A dialog with a secret that is shown once: neither Escape nor the browser's Back button closes it. */
export function secretDialog(title, build) {
  const node = dialog(title, build, { staysOnOtherPages: true });
  node.addEventListener("cancel", (event) => event.preventDefault());
  // A second Escape cannot be cancelled, so the key must not get that far.
  node.addEventListener("keydown", (event) => event.key === "Escape" && event.preventDefault());
  return node;
}

/* Confirms an irreversible action. The dialog stays open and shows the error if the action fails. */
export function confirm(title, text, label, action) {
  dialog(title, (close) => {
    const problem = el("div");
    const go = button(label, async () => {
      go.disabled = true;
      try {
        await action();
        close();
      } catch (failure) {
        setChildren(problem, note(failure.message));
        go.disabled = false;
      }
    }, { kind: "danger" });
    return [el("p", null, text), problem,
      el("div.actions", null, button("Cancel", close, { autofocus: true }), go)];
  });
}
