/*
 * DOM helpers. Values become text nodes or attributes, never markup: key names, webhook URLs and chain data are untrusted. No module
 * of the dashboard parses HTML.
 */

const SVG = "http://www.w3.org/2000/svg";
const SAFE_TARGET = /^(?:\/(?!\/)|#)/;

/* Creates an element from "tag.class.class", attributes (`onclick` takes a function) and children: nodes, text, nested lists or nothing. */
export function el(spec, attributes, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.classList.add(...classes);
  return appendAll(setAttributes(node, attributes), children);
}

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else if ((name === "href" || name === "src") && !SAFE_TARGET.test(value)) continue;
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}

function appendAll(node, children) {
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/* Replaces a node's children. */
export function setChildren(node, ...children) {
  node.replaceChildren();
  return appendAll(node, children);
}

const FOCUSABLE = "a, button, summary, input, select, textarea, [tabindex]";

/* Identifies a control across a refresh, by its tag, row and label. The text of a delivery's summary changes, so it is left out. */
function identityOf(control) {
  const { id, event } = control.closest("[data-id], [data-event]")?.dataset ?? {};
  const label = control.tagName === "SUMMARY" && event ? "" : control.getAttribute("aria-label") ?? control.textContent;
  return JSON.stringify([control.tagName, id, event, label]);
}

/* Replaces a node's children and restores the focus. For views that poll. */
export function refreshChildren(node, ...children) {
  const focused = node.contains(document.activeElement) ? identityOf(document.activeElement) : null;
  setChildren(node, ...children);
  if (focused === null) return;
  [...node.querySelectorAll(FOCUSABLE)].find((control) => identityOf(control) === focused)?.focus({ preventScroll: true });
}

/* A bar filled from 0 to 1. The width is set through the CSSOM: the content security policy forbids style attributes. */
export function bar(share, tone = "") {
  const fill = el("i");
  fill.style.inlineSize = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el(`span.bar${tone && `.${tone}`}`, { "aria-hidden": "true" }, fill);
}

/* Lets the browser paint, and serve the reader, before more work is done. */
export const nextTask = () => new Promise((resolve) => { setTimeout(resolve); });

export function swatch(colour) {
  const node = el("span.swatch", { "aria-hidden": "true" });
  node.style.background = colour;
  return node;
}

const ICONS = {
  overview: "M4 20V10M10 20V4M16 20v-7M22 20H2",
  keys: "M14.5 9.5a4 4 0 1 0-3.6 4L13 15.6V18h2.4v2.4H20v-3.2l-5.9-5.9a4 4 0 0 0 .4-1.8zM9.5 8.5h.01",
  webhooks: "M8 3v6M16 3v6M5 9h14v3a7 7 0 0 1-14 0zM12 19v3",
  policies: "M5 21V5a2 2 0 0 1 2-2h6a2 2 0 0 1 2 2v16M3 21h14M8 7h4M15 11h2a2 2 0 0 1 2 2v3a1.5 1.5 0 0 0 3 0V9l-3-3",
  networks: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM3 12h18M12 3c3 3 3 15 0 18M12 3c-3 3-3 15 0 18",
  addresses: "M4 8h13M13 4l4 4-4 4M20 16H7M11 12l-4 4 4 4",
  explorer: "M4 6l6 6-6 6M12 19h8",
  upstreams: "M12 3v14M6 9l6-6 6 6M4 21h16",
  methods: "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z",
  accounts: "M9 11a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7zM2.5 20c.5-3.5 3-5 6.5-5s6 1.5 6.5 5M16 4.5a3.5 3.5 0 0 1 0 6.5M18 15.5c2 .7 3.2 2.2 3.5 4.5",
  usage: "M3 17l5-6 4 3 8-9M3 21h18",
  costs: "M12 3v18M16 7.5C15 6 13.5 5.5 12 5.5c-2.2 0-4 1-4 3s1.8 2.8 4 3.3 4 1.4 4 3.4-1.8 3.3-4 3.3c-1.6 0-3.2-.6-4.2-2.2",
  errors: "M12 3 2 20h20zM12 10v4M12 17h.01",
  requests: "M10 17a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM21 21l-6-6M10 7v3l2 2",
  fleet: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  queues: "M4 6h16M4 12h16M4 18h10",
  audit: "M6 3h9l4 4v14H6zM14 3v5h5M9 12h7M9 16h5",
  alerts: "M6 17V10a6 6 0 0 1 12 0v7l2 2H4zM10 22h4",
  announcements: "M4 10v4h4l8 5V5L8 10zM19 9a4 4 0 0 1 0 6",
  account: "M12 12a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM4 21c.6-4 3.7-6 8-6s7.4 2 8 6",
  menu: "M3 6h18M3 12h18M3 18h18",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) {
    svg.setAttribute(key, value);
  }
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/* A QR code from rows of 0 and 1, with the quiet zone of four squares that scanners need. Dark on white in every theme. */
export function qrCode(rows, label) {
  const size = rows.length + 8;
  const path = rows.flatMap((row, y) => [...row].map((square, x) => (square === "1" ? `M${x + 4} ${y + 4}h1v1h-1z` : ""))).join("");
  const node = document.createElementNS(SVG, "svg");
  setAttributes(node, { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": label, class: "qr" });
  for (const [tag, attributes] of [["rect", { width: size, height: size, fill: "#fff" }], ["path", { d: path, fill: "#000" }]]) {
    node.append(setAttributes(document.createElementNS(SVG, tag), attributes));
  }
  return node;
}
