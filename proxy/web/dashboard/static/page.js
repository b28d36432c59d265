/* The application shell: sessions, routing by URL fragment, and the sidebar around each view. Views are loaded on first use. */

import { account, admin } from "./api.js";
import { el, icon, setChildren } from "./dom.js";
import { place } from "./location.js";
import { announcementBar } from "./announcements.js";
import { asyncButton, button, loadError, skeleton, toast } from "./components.js";
import * as format from "./format.js";

const VIEWS = {
  overview: { title: "Overview", client: "account", load: () => import("./views/overview.js") },
  keys: { title: "API keys", client: "account", load: () => import("./views/keys.js") },
  webhooks: { title: "Webhooks", client: "account", load: () => import("./views/webhooks.js") },
  policies: { title: "Gas policies", client: "account", load: () => import("./views/policies.js") },
  errors: { title: "Errors", client: "account", load: () => import("./views/errors.js"), group: "overview" },
  requests: { title: "Requests", client: "account", load: () => import("./views/requests.js") },
  networks: { title: "Networks", client: "account", load: () => import("./views/networks.js") },
  addresses: { title: "Addresses", client: "account", load: () => import("./views/addresses.js") },
  explorer: { title: "Explorer", client: "any", load: () => import("./views/explorer.js") },
  alerts: { title: "Alerts", client: "account", load: () => import("./views/alerts.js") },
  account: { title: "Account", client: "account", load: () => import("./views/account.js") },
  operator: { title: "Operator", client: "admin", load: () => import("./views/operator.js") },
};
const GROUPS = [
  ["API", ["overview", "networks", "requests", "webhooks", "policies", "addresses", "explorer"]],
  ["Settings", ["keys", "alerts", "account"]],
];
const OPERATOR_PAGES = { overview: "Overview", upstreams: "Upstreams", methods: "Methods", accounts: "Accounts", usage: "Usage", costs: "Costs", errors: "Errors", requests: "Requests", fleet: "Fleet", queues: "Queues", audit: "Audit log", announcements: "Announcements" };
const OPERATOR_FLAG = "penstock.operator";
const NOTICE_FLAG = "penstock.notice";
const NOTICES = { expired: ["Your session expired. Sign in again.", "bad"], deleted: ["Your account has been deleted."] };
const shell = document.getElementById("shell");
const asset = (name) => new URL(name, import.meta.url).pathname;

let main = document.getElementById("main");
let navigations = 0;
let announcements = null;

const clients = { account, admin };

/* #/webhooks/wh_1 -> ["webhooks", "wh_1"]. An unknown view falls back to the overview. */
function route() {
  const { parts } = place();
  return Object.hasOwn(VIEWS, parts[0]) ? parts : ["overview"];
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
    node.setAttribute("aria-label", `${label()} theme`);
    (await import("./chart.js")).redraw();
  }, { kind: "small", "aria-label": `${label()} theme` });
  return node;
}

function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    // Storage may be blocked; the value is not kept.
  }
}

function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/* --- sidebar --- */

export const brand = (href) => el("a.brand", { href }, el("img", { src: asset("icon.svg"), alt: "", width: "32", height: "32" }), "Penstock");

const link = (href, name, text, current) =>
  el("li", null, el("a", { href, "aria-current": current ? "page" : undefined }, icon(name), text));

function navigation([name, page]) {
  const groups = account.isSignedIn
    ? GROUPS.map(([title, names]) => [title, names.map((each) => link(`#/${each}`, each, VIEWS[each].title, each === (VIEWS[name].group ?? name)))])
    : [["API", [link("#/explorer", "explorer", "Explorer", name === "explorer")]]];
  if (admin.isSignedIn) {
    const here = name === "operator" ? page ?? "overview" : null;
    groups.push(["Operator", Object.entries(OPERATOR_PAGES).map(([key, text]) =>
      link(`#/operator/${key}`, key, text, key === here))]);
  }
  return el("nav", { "aria-label": "Main" }, groups.map(([title, items]) => [el("h2", null, title), el("ul", null, items)]));
}

function foot() {
  const who = account.session?.account;
  return el("div.foot", null,
    who && el("p.identity", null, el("b", null, who.name), account.session.person.email || "Read-only visit"),
    admin.isSignedIn && el("p.identity", null, el("b", null, admin.session.operator.name), "Operator"),
    el("div.actions", null, themeButton(), button("Sign out", signOut, { kind: "small" }),
      el("a.button.small", { href: "/docs" }, "Docs")));
}

function drawShell(parts) {
  const side = el("div.side");
  const menu = button(icon("menu"), () => {
    menu.setAttribute("aria-expanded", side.classList.toggle("open"));
  }, { kind: "menu", "aria-label": "Menu", "aria-expanded": "false" });
  setChildren(side, el("div.bar-row", null, brand(account.isSignedIn ? "#/overview" : "#/operator"), menu), navigation(parts), foot());
  main = el("main", { id: "main", tabindex: "-1" });
  shell.className = "signed";
  setChildren(shell, side, el("div.page", null, visitBanner(), announcements, main));
  // A new navigation starts at its top, and the page's own link may be further down. Scrolling needs the layout, so it waits for it.
  requestAnimationFrame(() => side.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" }));
}

/* An operator who looks at an account must not take it for their own. */
function visitBanner() {
  const { account: whose, person, expires_at: until } = account.session ?? {};
  if (person?.role !== "visitor") return null;
  const end = asyncButton("End visit", async () => {
    await account.signOut();
    history.replaceState(null, "", "#/operator/accounts");
    location.reload();
  }, { kind: "small" });
  return el("aside.visit", { "aria-label": "Visit" },
    el("p", null, "You are looking at the account ", el("b", null, whose.name), ` as an operator. You cannot change anything. The visit ends at ${format.clockTime(until)}.`), end);
}

async function signOut() {
  const open = [account, admin].filter((client) => client.isSignedIn);
  await Promise.allSettled(open.map((client) => client.signOut()));
  remember(OPERATOR_FLAG, null);
  history.replaceState(null, "", location.pathname);
  // Reloading clears what modules keep in memory, such as the explorer's API key.
  location.reload();
}

/* --- views --- */

async function showSignIn(panel, token) {
  const { show: showPanel } = await import("./views/sign-in.js");
  shell.className = "";
  main = el("main.sign-in", { id: "main", tabindex: "-1" });
  setChildren(shell, main);
  const onSignedIn = () => {
    if (admin.isSignedIn) remember(OPERATOR_FLAG, "1");
    show();
  };
  showPanel(main, { panel, token, onSignedIn, brand: brand("#/overview") });
}

const isAllowed = (client) => (client === "any" ? account.isSignedIn || admin.isSignedIn : clients[client].isSignedIn);

async function show() {
  const current = ++navigations;
  const parts = route();
  const view = VIEWS[parts[0]];
  document.title = `${view.title} · Penstock`;
  if (!isAllowed(view.client)) {
    document.title = "Sign in · Penstock";
    await showSignIn(view.client === "admin" ? "operator" : "account");
    return;
  }
  announcements ??= announcementBar(account.isSignedIn ? account : admin);
  drawShell(parts);
  setChildren(main, skeleton(6));
  try {
    const { show: showView } = await view.load();
    if (current !== navigations) return;
    setChildren(main, await showView(parts.slice(1)));
    if (current === 1) return;
    main.querySelector("h1")?.focus({ preventScroll: true });
    scrollTo(0, 0);
  } catch (failure) {
    if (current === navigations) setChildren(main, loadError(failure, show));
  }
}

/* The panel and the token of a link in a mail: #token=… signs in, #email=… confirms an address, #invitation=… joins an account. */
function mailedLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  return [["link", given.get("token")], ["confirm", given.get("email")], ["invitation", given.get("invitation")]].find(([, token]) => token) ?? [];
}

async function start() {
  const [panel, token] = mailedLink();
  if (token) {
    // Remove the token from the address bar and the history before loading anything else.
    history.replaceState(null, "", location.pathname);
    await showSignIn(panel, token);
    return;
  }
  const notice = recall(NOTICE_FLAG);
  if (Object.hasOwn(NOTICES, notice)) {
    remember(NOTICE_FLAG, null);
    toast(...NOTICES[notice]);
  }
  const wantsOperator = location.hash.startsWith("#/operator") || recall(OPERATOR_FLAG);
  await Promise.all([account.loadSession(), wantsOperator && admin.loadSession()]);
  await show();
}

addEventListener("hashchange", () => {
  if (mailedLink()[1]) start();
  else show();
});
addEventListener("signed-out", ({ detail }) => {
  remember(NOTICE_FLAG, detail.notice);
  location.reload();
});
start().catch((failure) => setChildren(main, loadError(failure, () => location.reload())));
