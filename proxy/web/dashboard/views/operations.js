/* The OpenAPI document as forms: an operation's parameters as fields, its body as JSON that starts from the document's example. */

import { el } from "../dom.js";
import * as forms from "../forms.js";

const METHODS = ["get", "post", "patch", "put", "delete"];
// These have forms of their own, or need no key.
const APART = new Set(["rpc_call"]);
const WITHOUT_KEY = new Set(["Account", "Operator"]);

const lookup = (document_, ref) => ref.slice(2).split("/").reduce((node, key) => node?.[key], document_) ?? {};

function resolve(document_, node) {
  if (!node?.$ref) return node ?? {};
  const { $ref, ...own } = node;
  return { ...resolve(document_, lookup(document_, $ref)), ...own };
}

/* Every operation that takes a key and is there. */
export function operations(document_) {
  return Object.entries(document_.paths).flatMap(([path, item]) => METHODS.filter((method) => item[method]).map((method) => {
    const spec = item[method];
    const parameters = [...(item.parameters ?? []), ...(spec.parameters ?? [])].map((each) => resolve(document_, each));
    return { id: spec.operationId, tag: spec.tags?.[0] ?? "Other", method: method.toUpperCase(), path, spec, parameters };
  })).filter(({ id, tag, spec }) => !APART.has(id) && !WITHOUT_KEY.has(tag) && !spec["x-planned"]);
}

function exampleOf(document_, { example, examples, schema }) {
  const inner = resolve(document_, schema);
  return example ?? Object.values(examples ?? {})[0]?.value ?? inner.examples?.[0] ?? inner.default;
}

function parameterField(document_, parameter) {
  const schema = resolve(document_, parameter.schema);
  const sample = exampleOf(document_, parameter);
  const hint = (parameter.description ?? "").split(/(?<=\.)\s/)[0].replaceAll("`", "");
  const label = parameter.in === "path" ? parameter.name : `${parameter.name} (query)`;
  if (schema.enum) {
    const options = Object.fromEntries(schema.enum.map((value) => [value, String(value)]));
    return { ...parameter, ...forms.select(label, parameter.required ? options : { "": "–", ...options }, { hint }) };
  }
  return { ...parameter, ...forms.text(label, { hint, required: parameter.required, class: "mono",
    placeholder: sample === undefined ? "" : String(sample), value: parameter.in === "path" && sample !== undefined ? String(sample) : "" }) };
}

function bodyField(document_, spec) {
  const content = resolve(document_, spec.requestBody).content?.["application/json"];
  if (!content) return null;
  const sample = Object.values(content.examples ?? {})[0]?.value ?? resolve(document_, content.schema).examples?.[0] ?? {};
  return forms.json("Body", { value: sample, rows: 9 });
}

export function requestForm(document_, { method, path, spec, parameters }) {
  const fields = parameters.filter((each) => each.in !== "header").map((each) => parameterField(document_, each));
  const body = bodyField(document_, spec);
  const read = () => {
    const filled = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(fields.find((each) => each.name === name).read()));
    const asked = fields.filter((each) => each.in === "query" && each.read() !== "").map((each) => [each.name, each.read()]);
    const tail = asked.length ? `?${new URLSearchParams(asked)}` : "";
    return { method, url: `${location.origin}/v1${filled}${tail}`, body: body ? body.read() ?? {} : undefined };
  };
  return { node: el("div", null, el("p.hint", null, spec.summary), forms.row(...fields.map(({ node }) => node)), body?.node), read };
}
