/* Builds request forms from the OpenAPI document: a field per parameter, and the body as JSON prefilled with the example. */

import { el } from "../dom.js";
import * as forms from "../forms.js";

const METHODS = ["get", "post", "patch", "put", "delete"];
// Left out: JSON-RPC has its own form, and these tags take a session instead of an API key.
const EXCLUDED = new Set(["rpc_call"]);
const SESSION_TAGS = new Set(["Account", "Operator"]);

const lookup = (openapi, ref) => ref.slice(2).split("/").reduce((node, key) => node?.[key], openapi) ?? {};

function resolve(openapi, node) {
  if (!node?.$ref) return node ?? {};
  const { $ref, ...own } = node;
  return { ...resolve(openapi, lookup(openapi, $ref)), ...own };
}

/* The operations that take an API key. */
export function operations(openapi) {
  return Object.entries(openapi.paths).flatMap(([path, item]) => METHODS.filter((method) => item[method]).map((method) => {
    const spec = item[method];
    const parameters = [...(item.parameters ?? []), ...(spec.parameters ?? [])].map((each) => resolve(openapi, each));
    return { id: spec.operationId, tag: spec.tags?.[0] ?? "Other", method: method.toUpperCase(), path, spec, parameters };
  })).filter(({ id, tag }) => !EXCLUDED.has(id) && !SESSION_TAGS.has(tag));
}

function exampleOf(openapi, { example, examples, schema }) {
  const inner = resolve(openapi, schema);
  return example ?? Object.values(examples ?? {})[0]?.value ?? inner.examples?.[0] ?? inner.default;
}

function parameterField(openapi, parameter) {
  const schema = resolve(openapi, parameter.schema);
  const sample = exampleOf(openapi, parameter);
  const hint = (parameter.description ?? "").split(/(?<=\.)\s/)[0].replaceAll("`", "");
  const label = parameter.in === "path" ? parameter.name : `${parameter.name} (query)`;
  if (schema.enum) {
    const options = Object.fromEntries(schema.enum.map((value) => [value, String(value)]));
    return { ...parameter, ...forms.select(label, parameter.required ? options : { "": "–", ...options }, { hint }) };
  }
  return { ...parameter, ...forms.text(label, { hint, required: parameter.required, class: "mono",
    placeholder: sample === undefined ? "" : String(sample), value: parameter.in === "path" && sample !== undefined ? String(sample) : "" }) };
}

function bodyField(openapi, spec) {
  const content = resolve(openapi, spec.requestBody).content?.["application/json"];
  if (!content) return null;
  const sample = Object.values(content.examples ?? {})[0]?.value ?? resolve(openapi, content.schema).examples?.[0] ?? {};
  return forms.json("Body", { value: sample, rows: 9 });
}

export function requestForm(openapi, { method, path, spec, parameters }) {
  const fields = parameters.filter((each) => each.in !== "header").map((each) => parameterField(openapi, each));
  const body = bodyField(openapi, spec);
  const read = () => {
    const filled = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(fields.find((each) => each.name === name).read()));
    const queried = fields.filter((each) => each.in === "query" && each.read() !== "").map((each) => [each.name, each.read()]);
    const tail = queried.length ? `?${new URLSearchParams(queried)}` : "";
    return { method, url: `${location.origin}/v1${filled}${tail}`, body: body ? body.read() ?? {} : undefined };
  };
  return { node: el("div", null, el("p.hint", null, spec.summary), forms.row(...fields.map(({ node }) => node)), body?.node), read };
}
