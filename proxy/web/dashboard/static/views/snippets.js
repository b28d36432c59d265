/* Code snippets for the explorer's request: curl, Python, and JavaScript (viem for JSON-RPC on EVM chains). They never contain the API key. */

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const indent = (text, by) => text.replaceAll("\n", `\n${by}`);

export const curl = ({ method, url, headers = {}, body }) => [
  `curl ${method === "GET" ? "" : `-X ${method} `}${quoted(url)}`,
  '-H "X-API-Key: $PENSTOCK_KEY"',
  ...Object.entries(headers).map(([name, value]) => `-H ${quoted(`${name}: ${value}`)}`),
  body !== undefined && "-H 'Content-Type: application/json'",
  body !== undefined && `-d ${quoted(JSON.stringify(body))}`,
].filter(Boolean).join(" \\\n  ");

/* JSON as a Python literal: true, false and null are replaced outside of strings. */
const pythonLiteral = (value) => JSON.stringify(value, null, 4)
  .replace(/"(?:\\.|[^"\\])*"|\b(?:true|false|null)\b/g, (token) => ({ true: "True", false: "False", null: "None" })[token] ?? token);

/* Entries of an object with these headers, each after a comma. */
const furtherEntries = (headers) => Object.entries(headers).map((pair) => `, ${pair.map((text) => JSON.stringify(text)).join(": ")}`).join("");

export const python = ({ method, url, headers = {}, body }) => `import os

import requests

reply = requests.request(
    ${JSON.stringify(method)},
    ${JSON.stringify(url)},
    headers={"X-API-Key": os.environ["PENSTOCK_KEY"]${furtherEntries(headers)}},${body === undefined ? "" : `\n    json=${indent(pythonLiteral(body), "    ")},`}
    timeout=30,
)
print(reply.headers.get("X-Compute-Units"), reply.json())`;

const fetchSnippet = ({ method, url, headers = {}, body }) => `const reply = await fetch(${JSON.stringify(url)}, {
  method: ${JSON.stringify(method)},
  headers: { "X-API-Key": process.env.PENSTOCK_KEY${furtherEntries(headers)}${body === undefined ? "" : ', "Content-Type": "application/json"'} },${body === undefined ? "" : `\n  body: JSON.stringify(${indent(JSON.stringify(body, null, 2), "  ")}),`}
});
console.log(reply.headers.get("X-Compute-Units"), await reply.json());`;

const viemSnippet = ({ url, body }) => `import { createPublicClient, http } from "viem";

const client = createPublicClient({
  transport: http(${JSON.stringify(url)}, {
    fetchOptions: { headers: { "X-API-Key": process.env.PENSTOCK_KEY } },
  }),
});
const result = await client.request({
  method: ${JSON.stringify(body.method)},
  params: ${indent(JSON.stringify(body.params ?? [], null, 2), "  ")},
});
console.log(result);`;

const isEvmCall = ({ body }) => typeof body?.method === "string" && body.method.includes("_");

export const viem = (request) => (isEvmCall(request) ? viemSnippet(request) : `// viem only supports JSON-RPC on EVM chains. This request uses fetch.\n${fetchSnippet(request)}`);

export const SNIPPETS = { curl, python, viem };
export const NAMES = { curl: "curl", python: "Python", viem: "viem" };
