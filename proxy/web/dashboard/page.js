/* The page: who is signed in, which view the address names, and the frame around it. Views are loaded when they are first asked for. */

import { account, admin } from "./api.js";
import { el, icon, put } from "./dom.js";
import { button, failed, toast, waiting } from "./components.js";

const VIEWS = {
  overview: { title: "Overview", side: "account", load: () => import("./views/overview.js") },
  keys: { title: "API keys", side: "account", load: () => import("./views/keys.js") },
  webhooks: { title: "Webhooks", side: "account", load: () => import("./views/webhooks.js") },
  policies: { title: "Gas policies", side: "account", load: () => import("./views/policies.js") },
  explorer: { title: "Explorer", side: "any", load: () => import("./views/explorer.js") },
  account: { title: "Account", side: "account", load: () => import("./views/account.js") },
  operator: { title: "Operator", side: "admin", load: () => import("./views/operator.js") },
};
const GROUPS = [
  ["Use", ["overview", "webhooks", "policies", "explorer"]],
  ["Settings", ["keys", "account"]],
];
const OPERATOR_PAGES = { upstreams: "Upstreams", accounts: "Accounts", usage: "Usage", queues: "Queues" };
const WAS_OPERATOR = "penstock.operator";
const IS_OVER = "penstock.over";
const shell = document.getElementById("shell");
const asset = (name) => new URL(name, import.meta.url).pathname;

let main = document.getElementById("main");
let serial = 0;

export const sides = { account, admin };

/* #/webhooks/wh_1 -> ["webhooks", "wh_1"]; whatever names no view is the first of them. */
function address() {
  try {
    const parts = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
    return Object.hasOwn(VIEWS, parts[0]) ? parts : ["overview"];
  } catch {
    return ["overview"]; // a % that begins nothing
  }
}

/* --- themes --- */

function themeButton() {
  const isDark = () => (document.documentElement.dataset.theme
    ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => (isDark() ? "Light" : "Dark");
  const node = button(label(), async () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    remember("penstock.theme", next);
    node.textContent = label();
    (await import("./chart.js")).redraw();
  }, { kind: "small", "aria-label": "Switch between the light and the dark theme" });
  return node;
}

function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    // Storage may be forbidden: then it is not remembered.
  }
}

function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/* --- the frame --- */

export const brand = (href) => el("a.brand", { href }, el("img", { src: asset("icon.svg"), alt: "" }), "Penstock");

const link = (href, name, text, current) =>
  el("li", null, el("a", { href, "aria-current": current ? "page" : undefined }, icon(name), text));

function navigation([name, page]) {
  const groups = account.isOpen
    ? GROUPS.map(([title, names]) => [title, names.map((each) => link(`#/${each}`, each, VIEWS[each].title, each === name))])
    : [["Use", [link("#/explorer", "explorer", "Explorer", name === "explorer")]]];
  if (admin.isOpen) {
    const here = name === "operator" ? page ?? "upstreams" : null;
    groups.push(["Operator", Object.entries(OPERATOR_PAGES).map(([key, text]) =>
      link(`#/operator/${key}`, key, text, key === here))]);
  }
  return el("nav", { "aria-label": "Main" }, groups.map(([title, items]) => [el("h2", null, title), el("ul", null, items)]));
}

function foot() {
  const who = account.session?.account;
  return el("div.foot", null,
    who && el("p.who", null, el("b", null, who.name), who.email),
    admin.isOpen && el("p.who", null, el("b", null, admin.session.operator.name), "operator"),
    el("div.actions", null, themeButton(), button("Sign out", leave, { kind: "small" }),
      el("a.button.small", { href: "/docs" }, "Docs")));
}

function frame(place) {
  const side = el("div.side");
  const menu = button(icon("menu"), () => {
    menu.setAttribute("aria-expanded", side.classList.toggle("open"));
  }, { kind: "menu", "aria-label": "Menu", "aria-expanded": "false" });
  put(side, el("div.bar-row", null, brand(account.isOpen ? "#/overview" : "#/operator"), menu), navigation(place), foot());
  main = el("main", { id: "main", tabindex: "-1" });
  shell.className = "signed";
  put(shell, side, main);
}

async function leave() {
  const open = [account, admin].filter((side) => side.isOpen);
  await Promise.allSettled(open.map((side) => side.leave()));
  remember(WAS_OPERATOR, null);
  history.replaceState(null, "", location.pathname);
  // With the page goes whatever its modules hold of this person, such as the explorer's key.
  location.reload();
}

/* --- which view --- */

async function door(kind, token) {
  const { show: showDoor } = await import("./views/sign-in.js");
  shell.className = "";
  main = el("main.door", { id: "main", tabindex: "-1" });
  put(shell, main);
  const entered = () => {
    if (admin.isOpen) remember(WAS_OPERATOR, "1");
    show();
  };
  showDoor(main, { kind, token, entered, brand: brand("#/overview") });
}

const allowed = (side) => (side === "any" ? account.isOpen || admin.isOpen : sides[side].isOpen);

async function show() {
  const turn = ++serial;
  const place = address();
  const view = VIEWS[place[0]];
  document.title = `${view.title} · Penstock`;
  if (!allowed(view.side)) {
    document.title = "Sign in · Penstock";
    await door(view.side === "admin" ? "operator" : "account");
    return;
  }
  frame(place);
  put(main, waiting(6));
  try {
    const { show: showView } = await view.load();
    if (turn !== serial) return;
    put(main, await showView(place.slice(1)));
    if (turn > 1) main.querySelector("h1")?.focus({ preventScroll: true });
    scrollTo(0, 0);
  } catch (failure) {
    if (turn === serial) put(main, failed(failure, show));
  }
}

async function start() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    // Out of the address bar, and of the history, before anything else is loaded.
    history.replaceState(null, "", location.pathname);
    await door("link", token);
    return;
  }
  if (recall(IS_OVER)) {
    remember(IS_OVER, null);
    toast("Your session is over: please sign in again.", "bad");
  }
  const wantsOperator = location.hash.startsWith("#/operator") || recall(WAS_OPERATOR);
  await Promise.all([account.look(), wantsOperator && admin.look()]);
  await show();
}

addEventListener("hashchange", () => {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) start();
  else show();
});
addEventListener("signed-out", () => {
  remember(IS_OVER, "1");
  location.reload();
});
start().catch((failure) => put(main, failed(failure, () => location.reload())));
