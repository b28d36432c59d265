/*
 * The explorer sends any REST operation, or any JSON-RPC method or route of a chain, as one of the account's keys, or with a pasted one, which stays in this
 * module's memory.
 */

import { requestForms } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { networkField, networks } from "../networks.js";
import { card, codeBlock, empty, facts, heading, note, segmentedControl, toast } from "../components.js";
import * as format from "../format.js";
import { highlighted } from "./json.js";
import { requestForm } from "./operations.js";
import { mayCall, mayRequest, mayUse, sessionKeys, tokenFor, usesOf } from "./session-keys.js";
import { NAMES, SNIPPETS } from "./snippets.js";

// Characters of a reply body. More would slow the page down.
const MAX_SHOWN = 200_000;
const PASTED = "";
// `id` is the key to send as, null until one is chosen. `key` is the pasted one.
const state = { id: null, key: "", kind: "rpc", language: "curl" };

export async function show() {
  const view = new Explorer(...await Promise.all([networks(), sessionKeys().catch(() => [])]));
  await view.setKind(state.kind);
  return view.node;
}

/* A choice between the account's keys and a pasted one; only the field to paste it into if there are none. */
function keyFields(keys, onChange) {
  const pasted = forms.text("API key", { value: state.key, class: "mono masked", placeholder: "svc_live_…", autocomplete: "off",
    hint: "Kept in this tab's memory only. Never stored.", oninput: () => { state.key = pasted.read(); } });
  const options = { ...Object.fromEntries(keys.map(({ id, name, mode }) => [id, `${name} (${mode})`])), [PASTED]: "Another key…" };
  if (!Object.hasOwn(options, state.id)) state.id = (keys.find((key) => mayRequest(key, "rpc:read")) ?? keys[0])?.id ?? PASTED;
  const limits = el("p.hint", { role: "status" });
  const show = () => {
    pasted.node.hidden = state.id !== PASTED;
    const key = keys.find(({ id }) => id === state.id);
    const uses = key ? usesOf(key) : [];
    setChildren(limits, uses.length > 0 && [`This key is limited: ${uses.join("; ")}. `, el("a", { href: "#/keys" }, "Change its limits")]);
  };
  const chosen = forms.select("Send as", options, { value: state.id, hint: "Requests are counted and limited as those of this key.",
    onchange: () => {
      state.id = chosen.read();
      show();
      onChange();
    } });
  show();
  return [keys.length > 0 && chosen.node, limits, pasted.node];
}

/* The value of X-API-Key, and whether the session's cookie goes with it. */
async function authorityOf({ id, key }) {
  if (id !== PASTED) return { key: await tokenFor(id), credentials: "same-origin" };
  if (!key) throw new Error("Enter an API key.");
  return { key, credentials: "omit" };
}

/* A form without fields, for a key that may send nothing. */
const nothing = (reason) => ({ node: note(reason, "wait"), read: () => { throw new Error(reason); } });

/* The request of a call to a chain. Nodes of some chains have routes such as `GET /blocks/{height}` in place of JSON-RPC methods; the
   params of a route have the members `path`, `query`, `headers` and `json`. */
function chainRequest(network, name, params) {
  const [method, template] = name.split(" ");
  if (!template) return { method: "POST", url: `${location.origin}/v1/rpc/${network}`, body: { jsonrpc: "2.0", id: 1, method: name, params: params ?? [] } };
  const { path = {}, query = {}, headers = {}, json } = params ?? {};
  const target = template.replace(/\{(\w+)\}/g, (_, part) => {
    if (!path[part]) throw new Error(`Enter the value of {${part}} in the params: {"path": {"${part}": "…"}}.`);
    return encodeURIComponent(path[part]);
  });
  const pairs = new URLSearchParams(Object.entries(query).flatMap(([key, values]) => [values].flat().map((value) => [key, value])));
  return { method, url: `${location.origin}/v1/rest/${network}${target}${pairs.size ? `?${pairs}` : ""}`, headers, body: method === "POST" ? json : undefined };
}

class Explorer {
  #fields = el("div");
  #reply = el("div", { "aria-live": "polite" });
  #snippet = codeBlock("Snippet", "");
  #request = null;

  /* `keys`: those that the session can send as. */
  constructor(available, keys) {
    this.networks = available;
    this.keys = keys;
    const form = forms.form([...keyFields(keys, () => this.#reset()), this.#fields], { label: "Send", send: () => this.#send() });
    form.addEventListener("input", () => this.#updateSnippet());
    form.addEventListener("change", () => this.#updateSnippet());
    setChildren(this.#reply, empty("No reply yet", "Send a request to see its body, headers and cost."));
    this.node = el("div", null, heading("Explorer", { lead: "Send requests and copy them as code." }),
      el("div.grid.loose", null,
        el("section.card", { "aria-label": "Request" }, el("div.spread", null, el("h2", null, "Request"),
          segmentedControl("Request type", { rpc: "Chain", rest: "REST" }, state.kind, (kind) => this.#reset(kind))), form),
        el("section.card", { "aria-label": "Reply" }, el("h2", null, "Reply"), this.#reply)),
      card(null, el("div.spread", null, el("h2", null, "Code"), segmentedControl("Language", NAMES, state.language, (language) => {
        state.language = language;
        this.#updateSnippet();
      })), this.#snippet.node));
  }

  /* The key to send as, or null for a pasted one, whose limits are not known. */
  get #key() {
    return this.keys.find(({ id }) => id === state.id) ?? null;
  }

  /* Offers what the chosen key may do. */
  #reset(kind = state.kind) {
    this.setKind(kind).catch((failure) => toast(failure.message, "bad"));
  }

  async setKind(kind) {
    state.kind = kind;
    const form = kind === "rpc" ? this.#chainForm() : this.#restForm(await requestForms());
    if (state.kind !== kind) return;
    this.current = form;
    setChildren(this.#fields, this.current.node);
    this.#updateSnippet();
  }

  #chainForm() {
    const key = this.#key;
    const usable = key ? this.networks.filter((each) => mayUse(key, each)) : this.networks;
    if (this.networks.length && !usable.length) return nothing("This key may not be used on any network of this service.");
    const network = networkField("Network", usable, { valueOf: (id) => id, hint: "chain/network", placeholder: "ethereum/mainnet" });
    const samples = () => (usable.find((each) => each.network === network.read())?.samples ?? []).filter((each) => !key || mayCall(key, each.method));
    // Allowed methods have a sample, or belong to no sample of another family.
    const others = () => (key?.allowed_methods ?? []).filter((name) => !usable.some((each) => each.samples.some(({ method }) => method === name)));
    const names = () => [...samples().map((each) => each.method), ...others()];
    const sample = () => samples().find((each) => each.method === method.read());
    const method = forms.suggest("Method or route", names(), { required: true, value: names()[0], class: "mono" });
    const params = forms.json("Params", { value: sample()?.params ?? [], rows: 5 });
    method.control.addEventListener("change", () => { if (sample()) params.write(sample().params); });
    network.control.addEventListener("change", () => {
      method.setSuggestions(names());
      if (sample() || !names().length) return;
      method.write(names()[0]);
      params.write(sample()?.params ?? []);
    });
    return {
      node: el("div", null, network.node, method.node, params.node),
      read: () => chainRequest(network.read(), method.read(), params.read()),
    };
  }

  #restForm(all) {
    const key = this.#key;
    const allowed = all.filter(({ scope }) => !key || mayRequest(key, scope));
    if (!allowed.length) return nothing("This key has no scope for any operation.");
    const grouped = {};
    for (const each of allowed) (grouped[each.tag] ??= {})[each.id] = `${each.method} ${each.path}`;
    const region = el("div");
    let inner = null;
    const show = () => {
      inner = requestForm(all.find(({ id }) => id === pick.read()));
      setChildren(region, inner.node);
    };
    const pick = forms.select("Operation", grouped, { onchange: show });
    show();
    return { node: el("div", null, pick.node, region), read: () => inner.read() };
  }

  /* Keeps the snippet in step with the form. While the input is invalid, the last valid snippet stays. */
  #updateSnippet() {
    try {
      this.#request = this.current.read();
      this.#snippet.show(SNIPPETS[state.language](this.#request));
    } catch {
      // Sending the request reports the error.
    }
  }

  async #send() {
    const authority = await authorityOf(state);
    this.#request = this.current.read();
    this.#updateSnippet();
    const { method, url, headers, body } = this.#request;
    const startedAt = performance.now();
    const reply = await fetch(url, {
      method, credentials: authority.credentials, cache: "no-store",
      headers: { ...headers, "X-API-Key": authority.key, ...(body !== undefined && { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await reply.text();
    this.#show(reply, text, performance.now() - startedAt);
  }

  #show(reply, text, duration) {
    const isCut = text.length > MAX_SHOWN;
    const body = codeBlock("Body", "");
    body.show(highlighted(isCut ? text.slice(0, MAX_SHOWN) : text));
    const headers = codeBlock("Headers", [...reply.headers].map(([name, value]) => `${name}: ${value}`).join("\n"));
    setChildren(this.#reply, !reply.ok && note(`Request failed with status ${reply.status}.`),
      facts([["Status", String(reply.status)], ["Duration", format.millis(duration)],
        ["Compute units", reply.headers.get("X-Compute-Units") ?? format.NONE],
        ["Rate limit remaining", reply.headers.get("X-RateLimit-Remaining") ?? format.NONE],
        reply.headers.get("X-Cache") && ["Cache", reply.headers.get("X-Cache")],
        reply.headers.get("X-Upstream") && ["Upstream", reply.headers.get("X-Upstream")]]),
      el("p"), isCut && note(`Showing the first ${format.number(MAX_SHOWN)} of ${format.number(text.length)} characters.`, "wait"),
      body.node, el("details.more", null, el("summary", null, "Headers"), headers.node));
  }
}
