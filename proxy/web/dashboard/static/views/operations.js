/* The form of one operation: a field per parameter, and the body as JSON prefilled with the example. */

import { el } from "../dom.js";
import * as forms from "../forms.js";

function parameterField(field) {
  const { name, required, hint, options, sample } = field;
  const isInPath = field.in === "path";
  const label = isInPath ? name : `${name} (query)`;
  if (options) {
    const choices = Object.fromEntries(options.map((value) => [value, String(value)]));
    return { ...field, ...forms.select(label, required ? choices : { "": "–", ...choices }, { hint }) };
  }
  return { ...field, ...forms.text(label, { hint, required, class: "mono", placeholder: sample === null ? "" : String(sample),
    value: isInPath && sample !== null ? String(sample) : "" }) };
}

export function requestForm({ method, path, summary, fields, body: sample }) {
  const filled = fields.map(parameterField);
  const body = sample === null ? null : forms.json("Body", { value: sample, rows: 9 });
  const read = () => {
    const target = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(filled.find((each) => each.name === name).read()));
    const queried = filled.filter((each) => each.in === "query" && each.read() !== "").map((each) => [each.name, each.read()]);
    const tail = queried.length ? `?${new URLSearchParams(queried)}` : "";
    return { method, url: `${location.origin}/v1${target}${tail}`, body: body ? body.read() ?? {} : undefined };
  };
  return { node: el("div", null, el("p.hint", null, summary), forms.row(...filled.map(({ node }) => node)), body?.node), read };
}
