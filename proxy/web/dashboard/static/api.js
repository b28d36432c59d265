/*
 * HTTP clients for the two APIs behind the dashboard: /v1/account with the account holder's session, /v1/admin with the operator's.
 * Session cookies are HttpOnly, so this module never sees them. It keeps each session's CSRF token, in memory only.
 */

const BASE = "/v1";

export class ApiError extends Error {
  constructor(status, message, retryAfter, details = {}) {
    super(message);
    this.details = details;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

class ApiClient {
  #name;

  constructor(name) {
    this.#name = name;
    this.session = null;
  }

  /* Whether the role of the signed-in person has a permission. */
  can(permission) {
    return this.session?.person?.permissions.includes(permission) ?? false;
  }

  get isSignedIn() {
    return this.session !== null;
  }

  /* Loads the current session; null if there is none. The first time, the page has requested it already. */
  async loadSession() {
    const early = globalThis.earlySessions?.[this.#name];
    if (early) globalThis.earlySessions[this.#name] = null;
    try {
      this.session = await this.#request("GET", "/session", undefined, await early);
    } catch (failure) {
      if (failure.status !== 401) throw failure;
      this.session = null;
    }
    return this.session;
  }

  async signIn(path, body) {
    this.session = await this.#request("POST", path, body);
    return this.session;
  }

  async signOut() {
    try {
      await this.post("/sign-out");
    } finally {
      this.session = null;
    }
  }

  get = (path) => this.#request("GET", path);
  post = (path, body) => this.#request("POST", path, body ?? {});
  put = (path, body) => this.#request("PUT", path, body);
  patch = (path, body) => this.#request("PATCH", path, body);
  remove = (path) => this.#request("DELETE", path);

  async #request(method, path, body, received = null) {
    const headers = {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (method !== "GET" && this.session) headers["X-CSRF-Token"] = this.session.csrf_token;
    const url = `${BASE}/${this.#name}${path}`;
    const reply = received ?? await send(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const data = await reply.json().catch(() => null);
    if (reply.ok) return data;
    // A used link or a wrong password is also a 401, but it does not end an existing session.
    if (reply.status === 401 && this.session && !path.startsWith("/sign-in")) {
      this.session = null;
      dispatchEvent(new CustomEvent("signed-out", { detail: { notice: "expired" } }));
    }
    const wait = Number(reply.headers.get("Retry-After")) || null;
    throw new ApiError(reply.status, data?.error?.message ?? `Request failed with status ${reply.status}.`, wait, data?.error?.details);
  }
}

async function send(url, options, cache = "no-store") {
  try {
    return await fetch(url, { ...options, credentials: "same-origin", cache });
  } catch {
    throw new ApiError(0, "Cannot reach the service. It may be restarting; try again in a moment.", null);
  }
}

export const account = new ApiClient("account");
export const admin = new ApiClient("admin");

/* A query string that leaves out empty values. */
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return set.length ? `?${new URLSearchParams(set)}` : "";
}

/* The sign-in options of this service: {mail}. */
export const serviceOptions = async () => (await send("/dashboard/options.json", {}, "default")).json();

let loading = null;

/* The operations that take an API key, [{id, tag, method, path, summary, fields, body}…], loaded once. */
export function requestForms() {
  loading ??= send("/dashboard/request-forms.json", {}, "default").then((reply) => reply.json()).catch((failure) => {
    loading = null;
    throw failure;
  });
  return loading;
}
