/* The explorer: any operation of the OpenAPI document, or any JSON-RPC method, with a key of one's own. The key stays in this module's memory. */

import { contract } from "../api.js";
import { el, put } from "../dom.js";
import * as forms from "../forms.js";
import { networkField, networks } from "../networks.js";
import { card, choice, codeBlock, empty, facts, heading, note } from "../components.js";
import * as format from "../format.js";
import { highlighted } from "./json.js";
import { METHODS } from "./methods.js";
import { operations, requestForm } from "./operations.js";
import { NAMES, SNIPPETS } from "./snippets.js";

// What a page can show without becoming slow.
const MOST_SHOWN = 200_000;
const kept = { key: "", way: "rpc", language: "curl" };

export async function show() {
  const [document_, known] = await Promise.all([contract(), networks()]);
  const view = new Explorer(document_, known);
  view.way(kept.way);
  return view.node;
}

class Explorer {
  #inside = el("div");
  #reply = el("div", { "aria-live": "polite" });
  #snippet = codeBlock("Snippet", "");
  #request = null;

  constructor(document_, known) {
    this.document = document_;
    this.known = known;
    const key = forms.text("API key", { value: kept.key, class: "mono veiled", placeholder: "svc_live_…", autocomplete: "off",
      hint: "Used from this page only, kept in its memory, gone when you close it.", oninput: () => { kept.key = key.read(); } });
    const form = forms.form([key.node, this.#inside], { label: "Send", send: () => this.#send() });
    form.addEventListener("input", () => this.#follow());
    form.addEventListener("change", () => this.#follow());
    put(this.#reply, empty("The reply appears here", "With what it cost, and the headers that came with it."));
    this.node = el("div", null, heading("Explorer", { lead: "Try a request before you write the program for it." }),
      el("div.grid.loose", null,
        el("section.card", { "aria-label": "Request" }, el("div.spread", null, el("h2", null, "Request"),
          choice("Kind of request", { rpc: "JSON-RPC", rest: "REST" }, kept.way, (way) => this.way(way))), form),
        el("section.card", { "aria-label": "Reply" }, el("h2", null, "Reply"), this.#reply)),
      card(null, el("div.spread", null, el("h2", null, "As a program"), choice("Language", NAMES, kept.language, (language) => {
        kept.language = language;
        this.#follow();
      })), this.#snippet.node));
  }

  way(way) {
    kept.way = way;
    this.current = way === "rpc" ? this.#rpc() : this.#rest();
    put(this.#inside, this.current.node);
    this.#follow();
  }

  #rpc() {
    const network = networkField("Network", this.known, { valueOf: (id) => id, hint: "chain/network", placeholder: "ethereum/mainnet" });
    const familyOf = () => this.known.find((each) => each.network === network.read())?.family ?? "evm";
    const methods = Object.keys(METHODS[familyOf()]);
    const method = forms.suggest("Method", methods, { required: true, value: methods[0], class: "mono" });
    const params = forms.json("Params", { value: METHODS[familyOf()][methods[0]], rows: 5 });
    method.control.addEventListener("change", () => {
      const sample = METHODS[familyOf()]?.[method.read()];
      if (sample) params.write(sample);
    });
    network.control.addEventListener("change", () => {
      const offered = Object.keys(METHODS[familyOf()]);
      method.offer(offered);
      if (offered.includes(method.read())) return;
      method.write(offered[0]);
      params.write(METHODS[familyOf()][offered[0]]);
    });
    return {
      node: el("div", null, forms.row(network.node, method.node), params.node),
      read: () => ({ method: "POST", url: `${location.origin}/v1/rpc/${network.read()}`,
        body: { jsonrpc: "2.0", id: 1, method: method.read(), params: params.read() ?? [] } }),
    };
  }

  #rest() {
    const all = operations(this.document);
    const grouped = {};
    for (const each of all) (grouped[each.tag] ??= {})[each.id] = `${each.method} ${each.path}`;
    const place = el("div");
    let inner = null;
    const pick = forms.select("Operation", grouped, { onchange: () => {
      inner = requestForm(this.document, all.find(({ id }) => id === pick.read()));
      put(place, inner.node);
    } });
    inner = requestForm(this.document, all.find(({ id }) => id === pick.read()));
    put(place, inner.node);
    return { node: el("div", null, pick.node, place), read: () => inner.read() };
  }

  /* The snippet says what would be sent; while something typed does not read, it stays as it was. */
  #follow() {
    try {
      this.#request = this.current.read();
      this.#snippet.show(SNIPPETS[kept.language](this.#request));
    } catch {
      // Told when it is sent.
    }
  }

  async #send() {
    if (!kept.key) throw new Error("Paste an API key first: the dashboard's own session opens no other part of the API.");
    this.#request = this.current.read();
    this.#follow();
    const { method, url, body } = this.#request;
    const began = performance.now();
    const reply = await fetch(url, {
      method, credentials: "omit", cache: "no-store",
      headers: { "X-API-Key": kept.key, ...(body !== undefined && { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await reply.text();
    this.#show(reply, text, performance.now() - began);
  }

  #show(reply, text, took) {
    const cut = text.length > MOST_SHOWN;
    const shown = codeBlock("Body", "");
    shown.show(highlighted(cut ? text.slice(0, MOST_SHOWN) : text));
    const head = codeBlock("Headers", [...reply.headers].map(([name, value]) => `${name}: ${value}`).join("\n"));
    put(this.#reply, !reply.ok && note(`The service answered ${reply.status}.`),
      facts([["Status", String(reply.status)], ["Took", format.millis(took)],
        ["Units", reply.headers.get("X-Compute-Units") ?? format.NONE],
        ["Left this second", reply.headers.get("X-RateLimit-Remaining") ?? format.NONE],
        reply.headers.get("X-Cache") && ["Cache", reply.headers.get("X-Cache")],
        reply.headers.get("X-Upstream") && ["Upstream", reply.headers.get("X-Upstream")]]),
      el("p"), cut && note(`Only the first ${format.number(MOST_SHOWN)} of ${format.number(text.length)} characters are shown.`, "wait"),
      shown.node, el("details.more", null, el("summary", null, "Headers"), head.node));
  }
}
