// A program written with @solana/kit: it subscribes to an account, logs, slots and roots, sends transfers and waits for them.
import {
  AccountRole,
  address,
  appendTransactionMessageInstruction,
  createDefaultRpcTransport,
  createKeyPairSignerFromPrivateKeyBytes,
  createSolanaRpcFromTransport,
  createSolanaRpcSubscriptions,
  createTransactionMessage,
  getSignatureFromTransaction,
  pipe,
  sendAndConfirmTransactionFactory,
  setTransactionMessageFeePayerSigner,
  setTransactionMessageLifetimeUsingBlockhash,
  signTransactionMessageWithSigners,
} from "@solana/kit";
import { show, task, until } from "./harness.mjs";

const rpc = createSolanaRpcFromTransport(
  createDefaultRpcTransport({ url: task.url, headers: { "x-api-key": task.key } }),
);
const rpcSubscriptions = createSolanaRpcSubscriptions(task.socket_url);
const sendAndConfirm = sendAndConfirmTransactionFactory({ rpc, rpcSubscriptions });
const payer = await createKeyPairSignerFromPrivateKeyBytes(Uint8Array.from(task.seed));
const payee = address(task.payee);
const seen = { sent: [], accounts: [], logs: [], slots: [], roots: [] };
const abort = new AbortController();

async function collect(subscription, add) {
  const found = await subscription.subscribe({ abortSignal: abort.signal });
  (async () => {
    for await (const each of found) add(each);
  })().catch(() => {});
}
await collect(rpcSubscriptions.accountNotifications(payee, { commitment: "confirmed", encoding: "base64" }), (each) =>
  seen.accounts.push(each.value.lamports),
);
await collect(rpcSubscriptions.logsNotifications({ mentions: [payee] }, { commitment: "confirmed" }), (each) =>
  seen.logs.push(each.value.signature),
);
await collect(rpcSubscriptions.slotNotifications(), (each) => seen.slots.push(each.slot));
await collect(rpcSubscriptions.rootNotifications(), (each) => seen.roots.push(each));
await until(() => seen.slots.length > 1 && seen.roots.length > 1);

// A transfer of the system program: its number, then the amount.
function transfer(lamports) {
  const data = new DataView(new ArrayBuffer(12));
  data.setUint32(0, 2, true);
  data.setBigUint64(4, lamports, true);
  const accounts = [
    { address: payer.address, role: AccountRole.WRITABLE_SIGNER },
    { address: payee, role: AccountRole.WRITABLE },
  ];
  return { programAddress: address("11111111111111111111111111111111"), accounts, data: new Uint8Array(data.buffer) };
}

for (let round = 0; round < task.rounds; round += 1) {
  const before = seen.accounts.length;
  const { value: blockhash } = await rpc.getLatestBlockhash({ commitment: "confirmed" }).send();
  const message = pipe(
    createTransactionMessage({ version: 0 }),
    (each) => setTransactionMessageFeePayerSigner(payer, each),
    (each) => setTransactionMessageLifetimeUsingBlockhash(blockhash, each),
    (each) => appendTransactionMessageInstruction(transfer(2_000_000n + BigInt(round)), each),
  );
  const signed = await signTransactionMessageWithSigners(message);
  await sendAndConfirm(signed, { commitment: "confirmed" });
  seen.sent.push(getSignatureFromTransaction(signed));
  await until(() => seen.accounts.length > before);
}
await until(() => seen.logs.length >= task.rounds);
abort.abort();
seen.slots = seen.slots.length;
seen.roots = seen.roots.length;
show(seen);
process.exit(0);
