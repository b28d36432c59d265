// A program written with permissionless and viem: for each EntryPoint a wallet that is deployed by its first operation, and one
// without ether whose operation a paymaster pays for. It calls a chain and a bundler directly.
import { createSmartAccountClient } from "permissionless";
import { toSimpleSmartAccount } from "permissionless/accounts";
import { concat, createPublicClient, createWalletClient, defineChain, encodeAbiParameters, http, numberToHex, pad } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { show, task } from "./harness.mjs";

const nativeCurrency = { name: "Ether", symbol: "ETH", decimals: 18 };
const chain = defineChain({ id: 31337, name: "dev", nativeCurrency, rpcUrls: { default: { http: [task.chain_url] } } });
const client = createPublicClient({ chain, transport: http(), pollingInterval: 100 });
const funder = createWalletClient({ account: privateKeyToAccount(task.private_key), chain, transport: http() });
const signer = privateKeyToAccount(task.signer_key);

async function wallet(version, paymaster) {
  const account = await toSimpleSmartAccount({
    client,
    owner: privateKeyToAccount(generatePrivateKey()),
    entryPoint: { address: task.entry_points[version], version },
    factoryAddress: task.factories[version],
    index: 7n,
  });
  const options = { account, chain, client, paymaster, bundlerTransport: http(task.bundler_url), pollingInterval: 100 };
  return { account, sender: createSmartAccountClient(options) };
}

async function sent({ account, sender }, value) {
  const hash = await sender.sendUserOperation({ calls: [{ to: task.recipient, value, data: "0x" }] });
  const receipt = await sender.waitForUserOperationReceipt({ hash, timeout: task.within_ms });
  return {
    address: account.address,
    success: receipt.success,
    entry_point: receipt.entryPoint,
    paymaster: receipt.paymaster ?? null,
    has_code: (await client.getCode({ address: account.address })) !== undefined,
    nonce: await account.getNonce(),
  };
}

// Signs the hash that the paymaster's getHash returns for a packed operation.
async function signature(version, packed) {
  const abi = task.paymaster_abis[version];
  const [address, times] = [task.paymasters[version], [task.valid_until, 0]];
  const hash = await client.readContract({ abi, address, functionName: "getHash", args: [packed, ...times] });
  return signer.signMessage({ message: { raw: hash } });
}

function times() {
  return encodeAbiParameters([{ type: "uint48" }, { type: "uint48" }], [task.valid_until, 0]);
}

// A signature of another message: for estimates it must be well-formed, or the paymaster reverts.
const stub = await signer.signMessage({ message: "stub" });
const two = (high, low) => concat([pad(numberToHex(high), { size: 16 }), pad(numberToHex(low), { size: 16 })]);

function paymaster06(paymaster) {
  const joined = (signed) => ({ paymasterAndData: concat([paymaster, times(), signed]) });
  return {
    getPaymasterStubData: async () => joined(stub),
    getPaymasterData: async (operation) => {
      const initCode = operation.initCode ?? concat([operation.factory ?? "0x", operation.factoryData ?? "0x"]);
      const packed = { ...operation, initCode, ...joined(stub), signature: "0x" };
      return joined(await signature("0.6", packed));
    },
  };
}

function paymaster07(version, paymaster) {
  const limits = { paymasterVerificationGasLimit: 100_000n, paymasterPostOpGasLimit: 1n };
  const joined = (signed) => ({ paymaster, paymasterData: concat([times(), signed]), ...limits });
  return {
    getPaymasterStubData: async () => joined(stub),
    getPaymasterData: async (op) => {
      const packed = {
        sender: op.sender,
        nonce: op.nonce,
        initCode: concat([op.factory ?? "0x", op.factoryData ?? "0x"]),
        callData: op.callData,
        accountGasLimits: two(op.verificationGasLimit, op.callGasLimit),
        preVerificationGas: op.preVerificationGas,
        gasFees: two(op.maxPriorityFeePerGas, op.maxFeePerGas),
        paymasterAndData: concat([paymaster, two(100_000n, 1n), times(), stub]),
        signature: "0x",
      };
      return joined(await signature(version, packed));
    },
  };
}

async function both(version) {
  const funded = await wallet(version);
  const hash = await funder.sendTransaction({ to: funded.account.address, value: 10n ** 18n });
  await client.waitForTransactionReceipt({ hash });
  const address = task.paymasters[version];
  const poor = await wallet(version, version === "0.6" ? paymaster06(address) : paymaster07(version, address));
  return { paid: await sent(funded, 5n), sponsored: await sent(poor, 0n) };
}

const seen = {};
for (const version of Object.keys(task.entry_points)) seen[version] = await both(version);
show(seen);
