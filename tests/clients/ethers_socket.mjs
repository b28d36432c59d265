// A program written with ethers' WebSocketProvider: it subscribes, reads, sends transactions and receives their events.
import { Wallet, WebSocketProvider } from "ethers";
import { call, outcome, show, task, together, until } from "./harness.mjs";

function describe(error) {
  return { name: error.code, rpc_code: (error.info?.error ?? error.error)?.code, message: error.message };
}

// A provider caches reads, also the nonce, for a quarter of a second by default: too long for transactions in a row.
const client = new WebSocketProvider(task.socket_url, undefined, { cacheTimeout: -1 });
const wallet = new Wallet(task.private_key, client);
const seen = { heads: [], logs: [] };
const blocks = [];

await client.on("block", (number) => blocks.push(number));
await client.on({ address: task.logger }, (log) => seen.logs.push(log));
await client.on({ address: task.recipient }, () => seen.logs.push("unexpected event"));

seen.chain_id = (await client.getNetwork()).chainId;
seen.block = (await client.getBlock(task.block)).hash;
seen.balance = await client.getBalance(wallet.address);
seen.replies = await together(task.calls.length, (at) => client.send(call(at).method, call(at).params), describe);
seen.unknown = await outcome(() => client.send("eth_nope", []), describe);

seen.sent = [];
let last = 0;
for (let round = 0; round < task.rounds; round += 1) {
  const sent = await wallet.sendTransaction({ to: task.logger, data: task.topic });
  seen.sent.push(sent.hash);
  last = (await sent.wait()).blockNumber;
}
await until(() => seen.logs.length >= task.rounds && blocks.some((number) => number >= last));
for (const number of blocks) {
  const block = await client.getBlock(number);
  seen.heads.push([`0x${number.toString(16)}`, block.hash, block.parentHash]);
}
seen.logs = seen.logs.map((log) => [log.transactionHash, log.blockHash, log.topics, log.removed]);
await client.removeAllListeners();
await client.send("eth_gasPrice", []); // ethers unsubscribes without waiting for the replies
await client.destroy();
// ethers has no error of its own for a refused handshake: the error comes from the socket.
seen.refused = await outcome(
  () =>
    new Promise((_, reject) => {
      const refused = new WebSocketProvider(task.bad_url);
      refused.websocket.onerror = (event) => reject(event.error ?? event);
    }),
  describe,
);
show(seen);
process.exit(0);
