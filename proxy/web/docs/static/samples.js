/* Sample requests in curl, JavaScript and Python, with the authentication of their operation. */

import { resolve, spec, valuesOf } from "./schema.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const json = (value) => JSON.stringify(value, null, 2);
const indented = (text, by) => text.replaceAll("\n", `\n${by}`);
export const server = () => new URL(spec.doc.servers?.[0]?.url ?? "/", location.origin).href.replace(/\/$/, "");

/* How a request is authenticated, by the name of its security scheme. Each value names the variables that hold secrets. */
const CREDENTIALS = {
  ApiKeyHeader: { headers: { "X-API-Key": "API_KEY" } },
  OperatorToken: { headers: { Authorization: "Bearer ADMIN_TOKEN" } },
  AccountSession: { cookie: true },
};

/* The first scheme of an operation that a script can use: an operator has a token beside the cookie. */
export function credentialsOf(operation) {
  const schemes = (operation.security ?? spec.doc.security ?? []).flatMap((way) => Object.keys(way));
  return CREDENTIALS[schemes.find((name) => name in CREDENTIALS)] ?? {};
}

/* The example with the name of the body's, so that a call of another family goes to one of its networks. */
function exampleValue(parameter, key) {
  const schema = resolve(parameter.schema);
  const own = parameter.examples?.[key]?.value ?? valuesOf(parameter)[0] ?? parameter.example;
  return own ?? schema.examples?.[0] ?? schema.default;
}

function exampleUrl({ path, parameters }, key) {
  const values = new Map(parameters.map((parameter) => [parameter.name, exampleValue(parameter, key)]));
  const whole = new Set(parameters.filter((parameter) => parameter["x-slashes"]).map(({ name }) => name));
  const encoded = (name) => (whole.has(name) ? String : encodeURIComponent)(values.get(name) ?? name);
  const filled = path.replace(/\{(\w+)\}/g, (_, name) => encoded(name));
  const isUseful = ({ name, schema }) => ![undefined, resolve(schema).default].includes(values.get(name));
  const queried = parameters.filter((parameter) => parameter.in === "query" && isUseful(parameter));
  const query = new URLSearchParams(queried.map(({ name }) => [name, values.get(name)])).toString();
  return server() + filled + (query && `?${query}`);
}

/* The parts of a request that all languages share. */
export function requestOf(entry, example) {
  const { headers = {}, cookie } = credentialsOf(entry.operation);
  return { url: exampleUrl(entry, example?.key), method: entry.method.toUpperCase(), headers, cookie,
    isSignIn: entry.path.startsWith("/account/sign-in"), changes: entry.method !== "get", body: example?.value };
}

/* `-c` keeps the cookie of a sign-in, `-b` sends it. */
function curl({ url, method, headers, cookie, isSignIn, changes, body }) {
  const named = Object.entries(headers).map(([name, value]) => `-H "${name}: ${value.replace(/\b[A-Z]+_[A-Z]+\b/, "$$$&")}"`);
  return [`curl ${method === "GET" ? "" : `-X ${method} `}${quoted(url)}`, ...named,
    isSignIn && "-c cookies.txt",
    cookie && "-b cookies.txt",
    cookie && changes && '-H "X-CSRF-Token: $CSRF_TOKEN"',
    body !== undefined && "-H 'Content-Type: application/json'",
    body !== undefined && `-d ${quoted(json(body))}`].filter(Boolean).join(" \\\n  ");
}

const RPC = /\/rpc\//;

/* A single call through viem, which most pages use; everything else through fetch. */
function javascript(request) {
  const { url, method, headers, cookie, changes, body } = request;
  if (RPC.test(url) && body && !Array.isArray(body) && /^(eth|net|web3)_/.test(body.method)) return viem(request);
  const sent = Object.entries(headers).map(([name, value]) => `"${name}": ${value.startsWith("Bearer ")
    ? `\`Bearer \${process.env.${value.slice(7)}}\`` : `process.env.${value}`}`);
  if (cookie) sent.push("cookie: process.env.SESSION_COOKIE");
  if (cookie && changes) sent.push('"X-CSRF-Token": process.env.CSRF_TOKEN');
  if (body !== undefined) sent.push('"Content-Type": "application/json"');
  const options = [method !== "GET" && `method: "${method}"`, sent.length > 0 && `headers: { ${sent.join(", ")} }`,
    body !== undefined && `body: JSON.stringify(${indented(json(body), "  ")})`].filter(Boolean);
  return `const reply = await fetch("${url}", {\n  ${options.join(",\n  ")},\n});\nconsole.log(reply.status, await reply.text());`;
}

function viem({ url, body }) {
  return `import { createPublicClient, http } from "viem";

const client = createPublicClient({
  transport: http("${url}", { fetchOptions: { headers: { "X-API-Key": process.env.API_KEY } } }),
});
console.log(await client.request({ method: "${body.method}", params: ${indented(json(body.params), "")} }));`;
}

/* JSON is Python but for its three literals, which follow white space in indented text. */
const literals = (text) => text.replace(/(?<=^|[\s[:])(true|false|null)(?=[,\s\]]|$)/gm,
  (word) => ({ true: "True", false: "False", null: "None" })[word]);

function python({ url, method, headers, cookie, changes, body }) {
  const sent = Object.entries(headers).map(([name, value]) => `"${name}": ${value.startsWith("Bearer ")
    ? `"Bearer " + os.environ["${value.slice(7)}"]` : `os.environ["${value}"]`}`);
  if (cookie) sent.push('"Cookie": os.environ["SESSION_COOKIE"]');
  if (cookie && changes) sent.push('"X-CSRF-Token": os.environ["CSRF_TOKEN"]');
  const options = [`"${url}"`, sent.length > 0 && `headers={${sent.join(", ")}}`,
    body !== undefined && `json=${literals(indented(json(body), "    "))}`].filter(Boolean);
  return `import os\n\nimport requests\n\nreply = requests.${method.toLowerCase()}(\n    ${options.join(",\n    ")},\n)
print(reply.status_code, reply.text)`;
}

/* The texts of one example, by language. */
export function samples(entry, example) {
  const request = requestOf(entry, example);
  return { curl: curl(request), JavaScript: javascript(request), Python: python(request) };
}
