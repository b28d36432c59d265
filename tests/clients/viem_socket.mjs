// A program written with viem's WebSocket transport: it subscribes, reads, sends transactions and receives their events.
import { createPublicClient, createWalletClient, defineChain, webSocket } from "viem";
import { privateKeyToAccount } from "viem/accounts";
import { call, outcome, show, task, together, until } from "./harness.mjs";

const account = privateKeyToAccount(task.private_key);
const chain = defineChain({
  id: task.chain_id,
  name: "network",
  nativeCurrency: { name: "Ether", symbol: "ETH", decimals: 18 },
  rpcUrls: { default: { http: [] } },
});

function transport(url = task.socket_url) {
  return webSocket(url, { reconnect: false, retryCount: 0 });
}

function describe(error) {
  return { name: error.name, rpc_code: error.code ?? error.cause?.code, message: error.message };
}

const client = createPublicClient({ chain, transport: transport() });
const wallet = createWalletClient({ account, chain, transport: transport() });
const seen = { heads: [], logs: [] };

// Heads through the transport, logs through watchEvent, and a second log filter that matches nothing.
const { unsubscribe } = await client.transport.subscribe({
  params: ["newHeads"],
  onData: ({ result }) => seen.heads.push([result.number, result.hash, result.parentHash]),
});
const stops = [unsubscribe];
stops.push(client.watchEvent({ address: task.logger, onLogs: (logs) => seen.logs.push(...logs) }));
const nothing = await client.transport.subscribe({
  params: ["logs", { address: task.recipient }],
  onData: () => seen.logs.push("unexpected event"),
});
stops.push(nothing.unsubscribe);

seen.chain_id = await client.getChainId();
seen.block = (await client.getBlock({ blockNumber: BigInt(task.block) })).hash;
seen.balance = await client.getBalance({ address: account.address });
seen.replies = await together(task.calls.length, (at) => client.request(call(at)), describe);
seen.unknown = await outcome(() => client.request({ method: "eth_nope" }), describe);

seen.sent = [];
for (let round = 0; round < task.rounds; round += 1) {
  const hash = await wallet.sendTransaction({ to: task.logger, data: task.topic });
  seen.sent.push(hash);
  await client.waitForTransactionReceipt({ hash });
}
await until(() => seen.logs.length >= task.rounds);
const last = (await client.getTransactionReceipt({ hash: seen.sent.at(-1) })).blockNumber;
await until(() => seen.heads.some(([number]) => BigInt(number) >= last));
seen.logs = seen.logs.map((log) => [log.transactionHash, log.blockHash, log.topics, log.removed]);
for (const stop of stops) await stop();
seen.refused = await outcome(async () => createPublicClient({ chain, transport: transport(task.bad_url) }).getBlockNumber(), describe);
show(seen);
process.exit(0);
