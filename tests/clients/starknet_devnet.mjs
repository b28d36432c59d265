// starknet.js, unmodified, on a real node: it reads, and transfers from a funded account.
import { Account, RpcProvider } from "starknet";
import { show, task } from "./harness.mjs";

const provider = new RpcProvider({ nodeUrl: task.url, headers: { "X-API-Key": task.key } });
const account = new Account({ provider, address: task.account.address, signer: task.account.key });
const token = task.token;

const balance = async () =>
  (await provider.callContract({ contractAddress: token, entrypoint: "balance_of", calldata: [task.to] }))[0];

const head = await provider.getBlockLatestAccepted();
const before = await balance();
const sent = await account.execute({ contractAddress: token, entrypoint: "transfer", calldata: [task.to, task.amount, "0"] });
const receipt = await provider.waitForTransaction(sent.transaction_hash, { retryInterval: 200 });

show({
  chain: await provider.getChainId(),
  number: head.block_number,
  hash: head.block_hash,
  spec: await provider.getSpecVersion(),
  sent: sent.transaction_hash,
  status: receipt.value?.execution_status ?? receipt.execution_status,
  before,
  after: await balance(),
});
