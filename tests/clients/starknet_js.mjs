// starknet.js, unmodified.
import { RpcProvider } from "starknet";
import { outcome, show, task } from "./harness.mjs";

const provider = new RpcProvider({ nodeUrl: task.url, headers: { "X-API-Key": task.key }, specVersion: "0.9.0" });
const describe = (error) => ({ code: error.baseError?.code ?? error.code, message: error.message });

show({
  chain: await provider.getChainId(),
  number: await provider.getBlockNumber(),
  latest: await provider.getBlock("latest"),
  old: await provider.getBlock(100),
  nonce: await provider.getNonceForAddress("0x1"),
  storage: await provider.getStorageAt("0x1", "0x2", 400),
  called: await provider.callContract({ contractAddress: "0x1", entrypoint: "balance_of", calldata: ["0x5"] }),
  receipt: (await provider.getTransactionReceipt(task.transaction)).value ?? null,
  missing: await outcome(() => provider.getBlock(99_999), describe),
});
