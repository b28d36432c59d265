// near-api-js, unmodified.
import { JsonRpcProvider } from "near-api-js";
import { outcome, show, task } from "./harness.mjs";

const provider = new JsonRpcProvider({ url: task.url, headers: { "X-API-Key": task.key } });
const describe = (error) => ({ name: error.name, message: error.message });

const account = await provider.viewAccount({ accountId: "alice.near" });
show({
  network: await provider.getNetworkId(),
  final: (await provider.viewBlock({ finality: "final" })).header,
  old: (await provider.viewBlock({ blockId: 200 })).header,
  account: { amount: String(account.amount), height: account.blockHeight ?? account.block_height ?? null },
  called: await provider.callFunction({ contractId: "alice.near", method: "greet", args: {} }),
  absent: await outcome(() => provider.viewAccount({ accountId: "bob.near" }), describe),
  missing: await outcome(() => provider.viewBlock({ blockId: 203 }), describe),
});
