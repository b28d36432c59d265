// @cosmjs/tendermint-rpc, unmodified: calls over HTTP, a transaction, and blocks over a WebSocket.
import { Comet38Client, HttpClient, WebsocketClient } from "@cosmjs/tendermint-rpc";
import { show, task } from "./harness.mjs";

const client = await Comet38Client.create(new HttpClient(task.url));
const status = await client.status();
const block = await client.block(2);
const tx = new TextEncoder().encode(`cosmjs=${Date.now()}`);
const sent = await client.broadcastTxSync({ tx });
let found = false;
for (let tries = 0; tries < 60 && !found; tries++) {
  await new Promise((resolve) => setTimeout(resolve, 250));
  found = await client.tx({ hash: sent.hash }).then((seen) => seen.height > 0, () => false);
}
const absent = await client.tx({ hash: new Uint8Array(32) }).then(() => false, () => true);
const socket = await Comet38Client.create(new WebsocketClient(task.socket));
const heights = await new Promise((resolve, reject) => {
  const seen = [];
  socket.subscribeNewBlockHeader().subscribe({
    next: (header) => {
      seen.push(header.height);
      if (seen.length === task.blocks) resolve(seen);
    },
    error: reject,
  });
});
socket.disconnect();
show({ chain: status.nodeInfo.network, height: block.block.header.height, found, absent, heights });
process.exit(0);
