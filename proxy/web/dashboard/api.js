/*
 * The API as the page uses it: /v1/account with the holder's session, /v1/admin with the operator's. The cookies are the browser's
 * and out of our reach; what we keep, in memory only, is each session's CSRF token.
 */

const BASE = "/v1";

export class Failure extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

class Side {
  #name;

  constructor(name) {
    this.#name = name;
    this.session = null;
  }

  get isOpen() {
    return this.session !== null;
  }

  /* Who is signed in here, or null. */
  async look() {
    try {
      this.session = await this.get("/session");
    } catch (failure) {
      if (failure.status !== 401) throw failure;
      this.session = null;
    }
    return this.session;
  }

  async enter(path, body) {
    this.session = await this.#ask("POST", path, body);
    return this.session;
  }

  async leave() {
    try {
      await this.post("/sign-out");
    } finally {
      this.session = null;
    }
  }

  get = (path) => this.#ask("GET", path);
  post = (path, body) => this.#ask("POST", path, body ?? {});
  put = (path, body) => this.#ask("PUT", path, body);
  patch = (path, body) => this.#ask("PATCH", path, body);
  remove = (path) => this.#ask("DELETE", path);

  async #ask(method, path, body) {
    const headers = {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (method !== "GET" && this.session) headers["X-CSRF-Token"] = this.session.csrf_token;
    const url = `${BASE}/${this.#name}${path}`;
    const reply = await reach(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const said = await reply.json().catch(() => null);
    if (reply.ok) return said;
    // A link that was used already, or a wrong password, ends no session that is there.
    if (reply.status === 401 && this.session && !path.startsWith("/sign-in")) {
      this.session = null;
      dispatchEvent(new CustomEvent("signed-out", { detail: this.#name }));
    }
    const wait = Number(reply.headers.get("Retry-After")) || null;
    throw new Failure(reply.status, said?.error?.message ?? `the service answered ${reply.status}`, wait);
  }
}

async function reach(url, options) {
  try {
    return await fetch(url, { ...options, credentials: "same-origin", cache: "no-store" });
  } catch {
    throw new Failure(0, "The service cannot be reached. It may be restarting: this is tried again.", null);
  }
}

export const account = new Side("account");
export const admin = new Side("admin");

/* A query without what is not set. */
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return set.length ? `?${new URLSearchParams(set)}` : "";
}

let document_ = null;

/* The OpenAPI document, once. */
export function contract() {
  document_ ??= reach(`${BASE}/openapi.json`, {}).then((reply) => reply.json()).catch((failure) => {
    document_ = null;
    throw failure;
  });
  return document_;
}
