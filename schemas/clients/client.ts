/**
 * A client for a Penstock service, for browsers, Node 20 and newer, Deno and Bun, without dependencies.
 *
 * Generated from the service's OpenAPI document by `penstock clients`: do not edit it.
 *
 *     const penstock = new Penstock("https://rpc.example.com", key);
 *     console.log(await penstock.listKeys());
 */

/** An error reply. `code`, `reason`, `param` and `requestId` are those of the reply; `status` is that of HTTP. */
export class PenstockError extends Error {
  readonly status: number;
  readonly code: string;
  readonly reason: string;
  readonly param: string;
  readonly requestId: string;
  readonly retryAfterMs: number;

  constructor(reply: Response, body: { error?: Record<string, string> } | null) {
    super(body?.error?.message ?? `status ${reply.status}`);
    this.name = "PenstockError";
    this.status = reply.status;
    this.code = body?.error?.code ?? "internal_error";
    this.reason = body?.error?.reason ?? "";
    this.param = body?.error?.param ?? "";
    this.requestId = reply.headers.get("X-Request-Id") ?? "";
    this.retryAfterMs = 1000 * Number(reply.headers.get("Retry-After") ?? 1);
  }
}

export interface Options {
  timeoutMs?: number;
  retries?: number;
}

/** Sends requests. One that was refused for its rate is sent again, and so is a read that failed on the service's side. */
export class Transport {
  private readonly base: string;
  private readonly key: string;
  private readonly timeoutMs: number;
  private readonly retries: number;

  constructor(url: string, key: string, { timeoutMs = 30_000, retries = 3 }: Options = {}) {
    this.base = `${url.replace(/\/+$/, "")}/v1`;
    this.key = key;
    this.timeoutMs = timeoutMs;
    this.retries = retries;
  }

  protected async send<Result>(method: string, path: string, query: object = {}, body?: unknown): Promise<Result> {
    const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null);
    const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
    for (let left = this.retries; ; left -= 1) {
      try {
        return (await this.once(`${this.base}${path}${search && `?${search}`}`, method, body)) as Result;
      } catch (error) {
        if (!(error instanceof PenstockError) || left <= 0) throw error;
        if (error.status !== 429 && (method !== "GET" || error.status < 500)) throw error;
        const wait = Math.min(error.retryAfterMs, this.timeoutMs);
        await new Promise((resolve) => setTimeout(resolve, wait));
      }
    }
  }

  private async once(url: string, method: string, body: unknown): Promise<unknown> {
    const headers: Record<string, string> = { "X-API-Key": this.key, Accept: "application/json" };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const signal = AbortSignal.timeout(this.timeoutMs);
    const reply = await fetch(url, { method, headers, signal, body: body === undefined ? null : JSON.stringify(body) });
    const isJson = reply.headers.get("Content-Type")?.startsWith("application/json");
    const data = isJson ? await reply.json() : await reply.text();
    if (!reply.ok) throw new PenstockError(reply, isJson ? data : null);
    return data;
  }
}

const at = encodeURIComponent;
