// Sends heads to many sockets with npm's ws. Same input and output as fan.py.
// Usage: node fan.mjs FOLDER, where FOLDER/node_modules has ws.
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";

const { WebSocketServer } = createRequire(path.resolve(process.argv[2], "package.json"))("ws");
const server = new WebSocketServer({ host: "127.0.0.1", port: 0, backlog: 4096, perMessageDeflate: false });
const subscribed = new Set();
const report = (values) => process.stdout.write(`${JSON.stringify(values)}\n`);
const pause = () => new Promise((resolve) => setTimeout(resolve, 20));

server.on("connection", (socket) =>
  socket.on("message", () => {
    subscribed.add(socket);
    socket.send('{"jsonrpc":"2.0","id":1,"result":"0x1"}');
  }),
);
server.on("listening", () => report({ port: server.address().port, path: "/" }));

async function sendAll({ rounds, together, size }) {
  const data = "x".repeat(size); // messages are JSON, which Node programs send as strings
  for (let sent = 0; sent < rounds; sent += together) {
    for (let at = 0; at < Math.min(together, rounds - sent); at += 1) {
      for (const socket of subscribed) socket.send(data);
    }
    await pause();
  }
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  await sendAll(JSON.parse(line));
  report({ sockets: subscribed.size });
}
process.exit(0);
