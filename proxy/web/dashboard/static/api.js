/*
 * HTTP clients for the two APIs behind the dashboard: /v1/account with the account holder's session, /v1/admin with the operator's.
 * Session cookies are HttpOnly, so this module never sees them. It keeps each session's CSRF token, in memory only.
 */

const BASE = "/v1";
// As many as one request may ask for.
const MAX_PARTS = 10;

export class ApiError extends Error {
  /* `errors`: the parameters at fault, [{param, message}…], if the API names them. */
  constructor(status, message, { details = {}, errors = [] } = {}) {
    super(message);
    this.details = details;
    this.errors = errors;
    this.status = status;
  }
}

class ApiClient {
  #name;
  #reads = [];

  constructor(name) {
    this.#name = name;
    this.session = null;
    this.announcements = null;
  }

  /* Whether the role of the signed-in person has a permission. */
  can(permission) {
    return this.session?.person?.permissions.includes(permission) ?? false;
  }

  get isSignedIn() {
    return this.session !== null;
  }

  /* Loads the current session, null if there is none, and the announcements. `early.js` has requested them already. */
  async loadSession() {
    const announcements = this.get("/announcements").catch(() => null);
    try {
      this.session = await this.get("/session");
      this.announcements = (await announcements)?.announcements ?? null;
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

  /* Reads that begin in the same turn are one request, so a page with five sections makes one call. Each has its own error. */
  get = (path) => new Promise((resolve, reject) => {
    this.#reads.push({ path, resolve, reject });
    if (this.#reads.length === 1) queueMicrotask(() => this.#readAll());
  });

  post = (path, body) => this.#request("POST", path, body ?? {});
  put = (path, body) => this.#request("PUT", path, body);
  patch = (path, body) => this.#request("PATCH", path, body);
  remove = (path) => this.#request("DELETE", path);

  #readAll() {
    const reads = this.#reads;
    this.#reads = [];
    for (let at = 0; at < reads.length; at += MAX_PARTS) this.#readParts(reads.slice(at, at + MAX_PARTS));
  }

  async #readParts(reads) {
    try {
      const parts = reads.length === 1 ? [{ status: 200, body: await this.#request("GET", reads[0].path) }]
        : (await this.#request("GET", `/reads${query({ paths: reads.map(({ path }) => path.replaceAll(",", "%2C")).join(",") })}`)).parts;
      parts.forEach(({ status, body }, at) => (status < 400 ? reads[at].resolve(body) : reads[at].reject(errorOf(status, body))));
    } catch (failure) {
      reads.forEach(({ reject }) => reject(failure));
    }
  }

  async #request(method, path, body) {
    const headers = {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (method !== "GET" && this.session) headers["X-CSRF-Token"] = this.session.csrf_token;
    const url = `${BASE}/${this.#name}${path}`;
    const reply = await send(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const data = await reply.json().catch(() => null);
    if (reply.ok) return data;
    // A used link or a wrong password is also a 401, but it does not end an existing session.
    if (reply.status === 401 && this.session && !path.startsWith("/sign-in")) {
      this.session = null;
      dispatchEvent(new CustomEvent("signed-out", { detail: { notice: "expired" } }));
    }
    throw errorOf(reply.status, data);
  }
}

function errorOf(status, data) {
  const { message = `Request failed with status ${status}.`, details, param, errors = param ? [{ param, message }] : [] } = data?.error ?? {};
  return new ApiError(status, message, { details, errors });
}

/* The reply to a request that `early.js` has sent, once. */
function earlyReply(url) {
  const found = globalThis.earlyReplies?.get(url);
  globalThis.earlyReplies?.delete(url);
  return found;
}

async function send(url, options, cache = "no-store") {
  try {
    return await earlyReply(url) ?? await fetch(url, { ...options, credentials: "same-origin", cache });
  } catch {
    throw new ApiError(0, "Cannot reach the service. It may be restarting; try again in a moment.");
  }
}

/* Reads a path of the API with a key, or with a token that stands for one. */
export async function readWithKey(key, path) {
  const reply = await send(`${BASE}${path}`, { headers: { "X-API-Key": key } });
  const data = await reply.json().catch(() => null);
  if (!reply.ok) throw errorOf(reply.status, data);
  return data;
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
