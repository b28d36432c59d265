/*
 * Part of the page itself, so it runs before any file is loaded. Applies the saved theme before the first paint, requests the
 * session, and loads the modules of the view at once: they would otherwise be found one after the other.
 */
{
  const recall = (name) => {
    try {
      return localStorage.getItem(name);
    } catch {
      return null; // Storage may be blocked; the system theme applies.
    }
  };
  const theme = recall("penstock.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;

  // The path of the modules, and the imports of each.
  const { prefix, imports } = JSON.parse(document.getElementById("modules").textContent);
  const preloaded = new Set();
  const preload = (name) => {
    if (!Object.hasOwn(imports, name) || preloaded.has(name)) return;
    preloaded.add(name);
    document.head.append(Object.assign(document.createElement("link"), { rel: "modulepreload", href: prefix + name }));
    imports[name].forEach(preload);
  };
  const preloadView = ([view = "", page = ""]) => {
    preload(`views/${view}.js`);
    if (view === "operator") preload(`views/${page && page !== "overview" ? page : "operator-overview"}.js`);
  };

  preload("page.js");
  // A link from a mail has another fragment. It needs no session.
  if (!location.hash || location.hash.startsWith("#/")) {
    // The same URL as `loadSession` requests, which takes the reply.
    const earlyReplies = globalThis.earlyReplies = new Map();
    const read = (name) => {
      const url = `/v1/${name}/reads?paths=%2Fannouncements%2C%2Fsession`;
      earlyReplies.set(url, fetch(url, { credentials: "same-origin", cache: "no-store" }).catch(() => null));
      return earlyReplies.get(url);
    };
    const path = location.hash.slice(2).split("?")[0].split("/");
    const isOperator = path[0] === "operator" || recall("penstock.operator");
    const account = read("account");
    if (isOperator) read("admin");
    if (path[0]) preloadView(path);
    else account.then((reply) => preloadView([reply?.ok ? "overview" : "sign-in"]));
  }
  // The first formatter loads the language's data, which takes far longer than others: while the requests are under way.
  new Intl.NumberFormat();
}
