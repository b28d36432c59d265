// A program written with permissionless and viem that uses only the service's address and a key: for each EntryPoint a wallet
// created by the service, deployed by its first operation and used again by its second; and operations that a bundler must refuse.
import { createSmartAccountClient } from "permissionless";
import { toSimpleSmartAccount } from "permissionless/accounts";
import { createPublicClient, createWalletClient, defineChain, http } from "viem";
import { formatUserOperationRequest, getUserOperationHash } from "viem/account-abstraction";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { show, task } from "./harness.mjs";

const headers = { "X-API-Key": task.key, "Content-Type": "application/json" };
const through = (path) => http(`${task.base_url}${path}/dev/mainnet`, { fetchOptions: { headers }, retryCount: 0 });
const nativeCurrency = { name: "Ether", symbol: "ETH", decimals: 18 };
const chain = defineChain({ id: 31337, name: "dev", nativeCurrency, rpcUrls: { default: { http: [] } } });
const client = createPublicClient({ chain, transport: through("/rpc"), pollingInterval: 100 });
const funder = createWalletClient({ account: privateKeyToAccount(task.private_key), chain, transport: through("/rpc") });

async function rest(method, path, body) {
  const response = await fetch(task.base_url + path, { method, headers, body: body && JSON.stringify(body) });
  return { status: response.status, body: await response.json() };
}

const bundler = async (method, params) => (await rest("POST", "/bundler/dev/mainnet", { jsonrpc: "2.0", id: 1, method, params })).body;

async function operated(sender, value) {
  const hash = await sender.sendUserOperation({ calls: [{ to: task.recipient, value, data: "0x" }] });
  const receipt = await sender.waitForUserOperationReceipt({ hash, timeout: task.within_ms });
  return {
    hash,
    success: receipt.success,
    entry_point: receipt.entryPoint,
    tx: receipt.receipt.transactionHash,
    block: receipt.receipt.blockNumber,
  };
}

// Operations that must be refused: one signed by another owner, and one with a used nonce.
async function refused(version, account, sender) {
  const { address: entryPoint } = account.entryPoint;
  const prepared = await sender.prepareUserOperation({ calls: [{ to: task.recipient, value: 1n, data: "0x" }] });
  const other = await toSimpleSmartAccount({
    client,
    owner: privateKeyToAccount(generatePrivateKey()),
    entryPoint: { address: entryPoint, version },
    factoryAddress: task.factories[version],
    address: account.address,
  });
  const forged = { ...prepared, signature: await other.signUserOperation(prepared) };
  const replayed = { ...prepared, nonce: prepared.nonce - 1n };
  replayed.signature = await account.signUserOperation(replayed);
  const answers = {};
  for (const [name, operation] of Object.entries({ forged, replayed })) {
    const userOperation = formatUserOperationRequest(operation);
    const hash = getUserOperationHash({ chainId: 31337, entryPointAddress: entryPoint, entryPointVersion: version, userOperation: operation });
    answers[name] = { hash, ...(await bundler("eth_sendUserOperation", [userOperation, entryPoint])) };
  }
  return answers;
}

async function lived(version) {
  const owner = privateKeyToAccount(generatePrivateKey());
  const created = await rest("POST", "/wallets/create", { owner: owner.address, chain: "dev", salt: "7", version });
  const entryPoint = { address: created.body.entry_point, version };
  const account = await toSimpleSmartAccount({ client, owner, entryPoint, factoryAddress: created.body.factory, index: 7n, nonceKey: 0n });
  const before = await rest("GET", `/wallets/${created.body.address}`);
  const hash = await funder.sendTransaction({ to: created.body.address, value: 10n ** 18n });
  await client.waitForTransactionReceipt({ hash });
  const sender = createSmartAccountClient({ account, chain, client, bundlerTransport: through("/bundler"), pollingInterval: 100 });
  const first = await operated(sender, 5n);
  const after = await rest("GET", `/wallets/${created.body.address}`);
  const second = await operated(sender, 6n);
  const then = await rest("GET", `/wallets/${created.body.address}`);
  return {
    owner: owner.address,
    computed: account.address,
    created,
    before,
    first,
    after,
    second,
    then,
    balance: await client.getBalance({ address: created.body.address }),
    by_hash: await bundler("eth_getUserOperationByHash", [second.hash]),
    refused: await refused(version, account, sender),
  };
}

const seen = {};
for (const version of Object.keys(task.factories)) seen[version] = await lived(version);
show(seen);
