// A webhook receiver with Node's standard library: WEBHOOK_SECRET=whsec_… node receiver.mjs
import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const SECRET = process.env.WEBHOOK_SECRET;
const TOLERANCE_S = 300;
const seen = new Set(); // ids of processed events: keep them in your database

const hmac = (key, text, encoding) => createHmac("sha256", key).update(text).digest(encoding);
const isRecent = (seconds) => Math.abs(Date.now() / 1000 - Number(seconds)) <= TOLERANCE_S;

// Compare in constant time.
function isEqual(one = "", other) {
  const [given, expected] = [Buffer.from(one), Buffer.from(other)];
  return given.length === expected.length && timingSafeEqual(given, expected);
}

// Standard Webhooks, sent with both formats: the key is the secret without whsec_, base64-decoded.
function standard(headers, body) {
  const [id, time] = [headers["webhook-id"], headers["webhook-timestamp"]];
  const key = Buffer.from(SECRET.slice("whsec_".length), "base64");
  const expected = `v1,${hmac(key, Buffer.concat([Buffer.from(`${id}.${time}.`), body]), "base64")}`;
  const given = (headers["webhook-signature"] ?? "").split(" ");
  return isRecent(time) && given.some((one) => isEqual(one, expected));
}

// Lower-case event types: the key is the whole secret, with whsec_.
function formatA(headers, body) {
  const time = headers["x-service-timestamp"];
  const expected = hmac(SECRET, Buffer.concat([Buffer.from(`${time}.`), body]), "hex");
  return isRecent(time) && isEqual(headers["x-service-signature"], expected);
}

// Upper-case event types: the key is the whole secret, with whsec_.
const formatB = (headers, body) => isEqual(headers["x-platform-signature"], `sha256=${hmac(SECRET, body, "hex")}`);

// One valid signature is enough.
const isGenuine = (headers, body) => [standard, formatA, formatB].some((check) => check(headers, body));

createServer(async (request, reply) => {
  const body = Buffer.concat(await request.toArray().catch(() => [])); // a body that breaks off has no valid signature
  if (!isGenuine(request.headers, body)) return reply.writeHead(401).end();
  const event = JSON.parse(body);
  if (!seen.has(event.id)) console.log(event.event_type ?? event.type, event.id, event.data);
  seen.add(event.id);
  reply.writeHead(204).end();
}).listen(Number(process.env.PORT ?? 3000), "127.0.0.1");
