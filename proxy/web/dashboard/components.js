/* The parts that views are put together from: buttons, badges, tables, states of waiting, messages, dialogs. */

import { el, put, renew } from "./dom.js";
import * as format from "./format.js";

const TONES = {
  active: "good", delivered: "good", up: "good", answered: "good", live: "live", closed: "good",
  paused: "wait", pending: "wait", held: "wait", parked: "wait", slow: "wait", lagging: "wait", resting: "wait",
  half_open: "wait", catching_up: "wait", expiring: "wait", cordoned: "wait", waiting: "wait",
  disabled: "bad", revoked: "off", failed: "bad", open: "bad", silent: "bad", stopped: "bad", expired: "off",
};

export const badge = (word, tone = TONES[word] ?? "off") => el(`span.badge.${tone}`, null, format.plain(word));

export function button(label, onclick, { kind = "", ...attributes } = {}) {
  return el(`button${kind && `.${kind}`}`, { type: "button", onclick, ...attributes }, label);
}

/* A button that is busy while its work is under way, and says so when that fails. */
export function working(label, work, options = {}) {
  const node = button(label, async () => {
    node.disabled = true;
    try {
      await work();
    } catch (failure) {
      toast(failure.message, "bad");
    } finally {
      node.disabled = false;
    }
  }, options);
  return node;
}

export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // There is no clipboard API on plain HTTP, where a self-hosted page may well be. Inside a dialog only its own nodes can be selected.
    const area = el("textarea", { value: text, readonly: true, class: "unseen" });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function copyButton(text, label = "Copy") {
  const node = button(label, async () => {
    await copied(typeof text === "function" ? text() : text);
    node.textContent = "Copied";
    setTimeout(() => { node.textContent = label; }, 1500);
  }, { kind: "small", "aria-live": "polite" });
  return node;
}

export function secret(text, label) {
  const shown = el("code.secret", { tabindex: "0", "aria-label": label }, text);
  return el("div.reveal", null, shown, copyButton(text));
}

export function codeBlock(label, text) {
  const inside = el("code", null, text);
  const node = el("figure.code", null,
    el("figcaption", null, el("span", null, label), copyButton(() => inside.textContent)),
    el("pre", { tabindex: "0", role: "region", "aria-label": label }, inside));
  return { node, show: (next) => put(inside, next) };
}

/* --- the whole view --- */

export const heading = (title, { lead, actions } = {}) => el("header.top", null,
  el("div", null, el("h1", { tabindex: "-1" }, title), lead && el("p.lead", null, lead)),
  actions && el("div.actions", null, actions));

export const card = (title, ...inside) => el("section.card", null,
  title && el("h2", null, title), ...inside);

export const facts = (pairs) => el("dl.facts", null, pairs.filter(Boolean).map(([name, value]) =>
  el("div", null, el("dt", null, name), el("dd", null, value))));

/* --- nothing, waiting, failed --- */

export const waiting = (lines = 3) => el("div.waiting", { role: "status", "aria-label": "Loading" },
  Array.from({ length: lines }, () => el("span.bone")));

export const empty = (title, text, ...actions) => el("div.empty", null,
  el("p.title", null, title), text && el("p", null, text), actions.length > 0 && el("div.actions", null, actions));

export const note = (text, tone = "bad") => el(`p.note.${tone}`, { role: tone === "bad" ? "alert" : "status" }, text);

export const failed = (failure, again) => el("div.empty", { role: "alert" },
  el("p.title", null, failure.status === 404 ? "This is not here" : "This could not be loaded"),
  el("p", null, failure.message), again && el("div.actions", null, button("Try again", again)));

/*
 * A place that shows waiting, then what `load` makes, or why not; `again` loads once more and leaves the old in place meanwhile. Of
 * several under way the one that was begun last is shown.
 */
export function place(load, lines) {
  const node = el("div.place", null, waiting(lines));
  let newest = 0;
  const again = async () => {
    const number = ++newest;
    const made = await load().catch((failure) => failed(failure, again));
    if (number === newest) renew(node, made);
  };
  return { node, again, ready: again() };
}

/* Polls while its node is in the page and the page is looked at. A failure is not the end. */
export function poll(node, seconds, work) {
  let delay = seconds;
  const turn = async () => {
    if (!node.isConnected) return;
    if (!document.hidden) {
      try {
        delay = (await work()) ?? seconds;
      } catch {
        delay = Math.min(30, delay * 2);
      }
    }
    setTimeout(turn, delay * 1000);
  };
  setTimeout(turn, seconds * 1000);
}

/* --- tables: on a narrow screen each row becomes a card, its cells named by `data-label` --- */

export function table(caption, columns, rows) {
  const shown = columns.filter(Boolean);
  const line = (row) => el("tr", row?.attributes, shown.map((column, at) => {
    const value = column.show(row?.data ?? row);
    const tag = at === 0 ? "th" : "td";
    return el(tag + (column.kind ? `.${column.kind}` : ""), { scope: at === 0 ? "row" : undefined, "data-label": column.name }, value);
  }));
  return el("div.scroll", null, el("table", null, el("caption.unseen", null, caption),
    el("thead", null, el("tr", null, shown.map(({ name, kind }) =>
      el(`th${kind ? `.${kind}` : ""}`, { scope: "col" }, kind === "do" ? el("span.unseen", null, name) : name)))),
    el("tbody", null, rows.map(line))));
}

export function pager({ page, total, limit }, go) {
  const pages = Math.max(1, Math.ceil(total / limit));
  if (pages === 1) return null;
  return el("nav.pager", { "aria-label": "Pages" },
    button("Previous", () => go(page - 1), { kind: "small", disabled: page <= 1 }),
    el("span", null, `Page ${page} of ${format.number(pages)}`),
    button("Next", () => go(page + 1), { kind: "small", disabled: page >= pages }));
}

/* One of a few: buttons of which one is pressed. */
export function choice(label, options, chosen, pick) {
  const buttons = Object.entries(options).map(([value, text]) => button(text, () => {
    for (const each of buttons) each.setAttribute("aria-pressed", each.dataset.value === value);
    pick(value);
  }, { "data-value": value, "aria-pressed": String(value === chosen) }));
  return el("div.choice", { role: "group", "aria-label": label }, buttons);
}

/* --- messages --- */

export function toast(text, tone = "good") {
  const node = el(`p.toast.${tone}`, null, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), tone === "bad" ? 8000 : 4000);
}

/* --- dialogs --- */

/* A modal dialog. The browser keeps the focus inside, gives it back afterwards, and closes it on Escape. */
export function dialog(title, build) {
  const node = el("dialog", { "aria-labelledby": "dialog-title" });
  const close = () => node.close();
  put(node, el("div.inside", null,
    el("header", null, el("h2", { id: "dialog-title" }, title), button("×", close, { kind: "quiet", "aria-label": "Close" })),
    build(close)));
  node.addEventListener("close", () => node.remove());
  document.body.append(node);
  node.showModal();
  return node;
}

/* Asks before something that cannot be taken back; `work` runs in the dialog, which stays open when it fails. */
export function confirm(title, text, label, work) {
  dialog(title, (close) => {
    const problem = el("div");
    const go = button(label, async () => {
      go.disabled = true;
      try {
        await work();
        close();
      } catch (failure) {
        put(problem, note(failure.message));
        go.disabled = false;
      }
    }, { kind: "danger" });
    return [el("p", null, text), problem,
      el("div.actions", null, button("Cancel", close, { autofocus: true }), go)];
  });
}
