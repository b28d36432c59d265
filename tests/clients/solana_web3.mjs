// A program written with @solana/web3.js: it subscribes to everything that the library offers, sends transfers and waits for them.
import {
  Connection,
  Keypair,
  PublicKey,
  SystemProgram,
  Transaction,
  sendAndConfirmTransaction,
} from "@solana/web3.js";
import { show, task, until } from "./harness.mjs";

const connection = new Connection(task.url, {
  commitment: "confirmed",
  wsEndpoint: task.socket_url,
  httpHeaders: { "X-API-Key": task.key },
});
const payer = Keypair.fromSeed(Uint8Array.from(task.seed));
const payee = new PublicKey(task.payee);
const seen = { sent: [], accounts: [], programs: [], logs: [], slots: [], roots: [], updates: [] };

connection.onAccountChange(payee, (account) => seen.accounts.push(account.lamports), { commitment: "confirmed" });
connection.onProgramAccountChange(SystemProgram.programId, (each) => seen.programs.push(each.accountId.toBase58()));
connection.onLogs(payee, (logs) => seen.logs.push(logs.signature), "confirmed");
connection.onSlotChange((slot) => seen.slots.push(slot.slot));
connection.onRootChange((root) => seen.roots.push(root));
connection.onSlotUpdate((update) => seen.updates.push(update.type));
await until(() => seen.slots.length > 1 && seen.roots.length > 1 && seen.updates.length > 1);

for (let round = 0; round < task.rounds; round += 1) {
  const before = seen.accounts.length;
  const transfer = SystemProgram.transfer({ fromPubkey: payer.publicKey, toPubkey: payee, lamports: 1_000_000 + round });
  seen.sent.push(await sendAndConfirmTransaction(connection, new Transaction().add(transfer), [payer]));
  await until(() => seen.accounts.length > before);
}
await until(() => seen.logs.length >= task.rounds && seen.programs.includes(task.payee));
seen.slots = seen.slots.length;
seen.roots = seen.roots.length;
seen.updates = [...new Set(seen.updates)];
show(seen);
process.exit(0);
