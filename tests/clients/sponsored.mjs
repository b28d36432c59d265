// A program written with permissionless and viem that uses only the service's address and a key: accounts without ether, whose
// operations a gas policy pays for, through viem's paymaster client; and attempts to change a sponsored operation after it was
// signed.
import { createSmartAccountClient } from "permissionless";
import { toSimpleSmartAccount } from "permissionless/accounts";
import { createPublicClient, defineChain, http } from "viem";
import { createPaymasterClient, formatUserOperationRequest } from "viem/account-abstraction";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { outcome, show, task } from "./harness.mjs";

const headers = { "X-API-Key": task.key, "Content-Type": "application/json" };
const through = (path) => http(`${task.base_url}${path}/dev/mainnet`, { fetchOptions: { headers }, retryCount: 0 });
const nativeCurrency = { name: "Ether", symbol: "ETH", decimals: 18 };
const chain = defineChain({ id: 31337, name: "dev", nativeCurrency, rpcUrls: { default: { http: [] } } });
const client = createPublicClient({ chain, transport: through("/rpc"), pollingInterval: 100 });
const paymaster = createPaymasterClient({ transport: through("/paymaster") });
const calls = [{ to: task.recipient, value: 0n, data: "0x" }];

async function rest(method, path, body) {
  const response = await fetch(task.base_url + path, { method, headers, body: body && JSON.stringify(body) });
  return { status: response.status, body: await response.json() };
}

async function policy(rules) {
  return (await rest("POST", "/gas/policies", { name: "Client", chain: "dev", rules })).body.id;
}

async function poor(version, policyId) {
  const account = await toSimpleSmartAccount({
    client,
    owner: privateKeyToAccount(generatePrivateKey()),
    entryPoint: { address: task.entry_points[version], version },
    factoryAddress: task.factories[version],
    nonceKey: 0n,
  });
  const paid = { paymaster, paymasterContext: { policyId } };
  const options = { account, chain, client, ...paid, bundlerTransport: through("/bundler"), pollingInterval: 100 };
  return { account, sender: createSmartAccountClient(options) };
}

async function included(sender, hash) {
  const receipt = await sender.waitForUserOperationReceipt({ hash, timeout: task.within_ms });
  return { success: receipt.success, paymaster: receipt.paymaster, cost_wei: receipt.actualGasCost };
}

const send = (account, operation) =>
  rest("POST", "/bundler/dev/mainnet", {
    jsonrpc: "2.0",
    id: 1,
    method: "eth_sendUserOperation",
    params: [formatUserOperationRequest(operation), account.entryPoint.address],
  });

// The account signs any operation: it is up to the paymaster to refuse changed ones.
async function signed(account, operation) {
  return { ...operation, signature: await account.signUserOperation(operation) };
}

async function lived(version) {
  const policyId = await policy({ max_total_usd: "1000" });
  const { account, sender } = await poor(version, policyId);
  const first = await included(sender, await sender.sendUserOperation({ calls }));
  const second = await included(sender, await sender.sendUserOperation({ calls }));
  const balance = await client.getBalance({ address: account.address });
  return { policy: policyId, address: account.address, balance, costs: [first, second] };
}

// Without a paymaster client: the reply of /gas/sponsor is put into the operation.
async function byHand(version) {
  const policyId = await policy({ max_total_usd: "1000" });
  const { account, sender } = await poor(version, policyId);
  const operation = await sender.prepareUserOperation({ calls });
  for (const name of ["account", "paymaster", "paymasterData", "paymasterAndData", "signature"]) delete operation[name];
  const body = { chain: "dev", policy_id: policyId, user_operation: formatUserOperationRequest(operation), entry_point: account.entryPoint.address };
  const answer = await rest("POST", "/gas/sponsor", body);
  const { paymasterAndData, paymasterVerificationGasLimit, paymasterPostOpGasLimit, ...given } = answer.body;
  const own = paymasterAndData
    ? { paymasterAndData }
    : {
        paymaster: given.paymaster,
        paymasterData: given.paymasterData,
        paymasterVerificationGasLimit: BigInt(paymasterVerificationGasLimit),
        paymasterPostOpGasLimit: BigInt(paymasterPostOpGasLimit),
      };
  const sent = await send(account, await signed(account, { ...operation, ...own }));
  return { policy: policyId, answer, again: await rest("POST", "/gas/sponsor", body), included: await included(sender, sent.body.result) };
}

async function drained(version) {
  const policyId = await policy({ max_total_usd: "1000" });
  const { account, sender } = await poor(version, policyId);
  const { account: _, ...prepared } = await sender.prepareUserOperation({ calls });
  const more = (name) => ({ ...prepared, [name]: prepared[name] + 1n });
  const changed = {
    callGasLimit: more("callGasLimit"),
    verificationGasLimit: more("verificationGasLimit"),
    preVerificationGas: more("preVerificationGas"),
    maxFeePerGas: more("maxFeePerGas"),
    maxPriorityFeePerGas: { ...prepared, maxPriorityFeePerGas: prepared.maxPriorityFeePerGas - 1n },
    callData: { ...prepared, callData: await account.encodeCalls([{ to: task.recipient, value: 0n, data: "0x1234" }]) },
    ...(version === "0.6" ? {} : { paymasterVerificationGasLimit: more("paymasterVerificationGasLimit") }),
  };
  const answers = {};
  for (const [name, operation] of Object.entries(changed)) answers[name] = (await send(account, await signed(account, operation))).body;
  const good = await signed(account, prepared);
  const sent = (await send(account, good)).body;
  const receipt = await included(sender, sent.result);
  answers.replayed = (await send(account, good)).body;
  return { policy: policyId, answers, receipt };
}

// Sponsored for one second, and sent after that.
async function expired(version) {
  const policyId = await policy({ expiry_seconds: 1 });
  const { account, sender } = await poor(version, policyId);
  const { account: _, ...prepared } = await sender.prepareUserOperation({ calls });
  const operation = await signed(account, prepared);
  await new Promise((resolve) => setTimeout(resolve, 3000));
  return (await send(account, operation)).body;
}

async function refused(version) {
  const policyId = await policy({ max_gas_usd: "0.000000001" });
  const { sender } = await poor(version, policyId);
  const describe = (error) => ({ name: error.name, code: error.walk?.((each) => each.code)?.code, message: error.message });
  return outcome(() => sender.prepareUserOperation({ calls }), describe);
}

async function all(version) {
  return {
    lived: await lived(version),
    by_hand: await byHand(version),
    drained: await drained(version),
    expired: await expired(version),
    refused: await refused(version),
  };
}

const found = await Promise.all(task.versions.map(all));
show(Object.fromEntries(task.versions.map((version, at) => [version, found[at]])));
