/* The request of the explorer as a program: for the shell, Python, and JavaScript (viem for JSON-RPC of EVM chains). Never with the key itself. */

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const indent = (text, by) => text.replaceAll("\n", `\n${by}`);

export const curl = ({ method, url, body }) => [
  `curl ${method === "GET" ? "" : `-X ${method} `}${quoted(url)}`,
  '-H "X-API-Key: $PENSTOCK_KEY"',
  body !== undefined && "-H 'Content-Type: application/json'",
  body !== undefined && `-d ${quoted(JSON.stringify(body))}`,
].filter(Boolean).join(" \\\n  ");

/* JSON's words in Python's, outside of strings. */
const pythonic = (value) => JSON.stringify(value, null, 4)
  .replace(/"(?:\\.|[^"\\])*"|\b(?:true|false|null)\b/g, (token) => ({ true: "True", false: "False", null: "None" })[token] ?? token);

export const python = ({ method, url, body }) => `import os

import requests

reply = requests.request(
    ${JSON.stringify(method)},
    ${JSON.stringify(url)},
    headers={"X-API-Key": os.environ["PENSTOCK_KEY"]},${body === undefined ? "" : `\n    json=${indent(pythonic(body), "    ")},`}
    timeout=30,
)
print(reply.headers.get("X-Compute-Units"), reply.json())`;

const fetched = ({ method, url, body }) => `const reply = await fetch(${JSON.stringify(url)}, {
  method: ${JSON.stringify(method)},
  headers: { "X-API-Key": process.env.PENSTOCK_KEY${body === undefined ? "" : ', "Content-Type": "application/json"'} },${body === undefined ? "" : `\n  body: JSON.stringify(${indent(JSON.stringify(body, null, 2), "  ")}),`}
});
console.log(reply.headers.get("X-Compute-Units"), await reply.json());`;

const viemed = ({ url, body }) => `import { createPublicClient, http } from "viem";

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

export const viem = (request) => (isEvmCall(request) ? viemed(request) : `// viem speaks JSON-RPC of EVM chains; for this request, plain JavaScript.\n${fetched(request)}`);

export const SNIPPETS = { curl, python, viem };
export const NAMES = { curl: "curl", python: "Python", viem: "viem" };
