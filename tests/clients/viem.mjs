// A program written with viem: reads, batches, a transaction, and every kind of error.
import { createPublicClient, createWalletClient, defineChain, http, keccak256, parseAbi } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { call, outcome, outcomes, show, task, together } from "./harness.mjs";

const abi = parseAbi(["function Error(string) view", "function Panic(uint256) view", "function Custom(uint256) view"]);
const account = privateKeyToAccount(task.private_key);
const near = network(task.chain_id, task.url);
const far = network(task.far_chain_id, task.far_url);

function network(id, url) {
  const nativeCurrency = { name: "Ether", symbol: "ETH", decimals: 18 };
  return defineChain({ id, name: "network", nativeCurrency, rpcUrls: { default: { http: [url] } } });
}

function transport(key, options) {
  return http(undefined, { fetchOptions: { headers: { "X-API-Key": key } }, ...options });
}

function reader(key = task.key, options = {}) {
  return createPublicClient({ chain: near, transport: transport(key, options) });
}

function writer(from = account, chain = near) {
  return createWalletClient({ account: from, chain, transport: transport(task.key) });
}

// viem nests an error's causes: collect the names of all of them, and their details.
function describe(error) {
  const found = { types: [], message: error.message };
  for (let at = error; at instanceof Error; at = at.cause) {
    found.types.push(at.name);
    if (typeof at.code === "number") found.rpc_code = at.code;
    found.status ??= at.status;
    found.data = at.raw ?? at.data ?? found.data;
    found.reason ??= at.reason;
  }
  return found;
}

async function reads(client) {
  const block = await client.getBlock({ blockNumber: BigInt(task.block), includeTransactions: true });
  const fees = await client.getFeeHistory({ blockCount: 4, rewardPercentiles: [25, 75] });
  const logs = await client.getLogs({ address: task.logger, fromBlock: 0n, toBlock: "latest" });
  return {
    chain_id: await client.getChainId(),
    block_number: await client.getBlockNumber(),
    block: { hash: block.hash, transactions: block.transactions.map((made) => [made.hash, made.gas]) },
    balance: await client.getBalance({ address: account.address }),
    nonce: await client.getTransactionCount({ address: account.address }),
    gas: await client.estimateGas({ account: account.address, to: task.logger, data: task.topic }),
    gas_price: await client.getGasPrice(),
    code: await client.getCode({ address: task.logger }),
    fees: { oldest: fees.oldestBlock, base: fees.baseFeePerGas, reward: fees.reward },
    logs: logs.map((log) => [log.blockNumber, log.transactionHash, log.topics, log.data]),
  };
}

async function batches() {
  const sent = [];
  const onFetchRequest = async (request) => {
    sent.push((await request.clone().json()).length);
  };
  const client = reader(task.key, { batch: true, onFetchRequest });
  const replies = [];
  for (const size of task.batches) replies.push(await together(size, (at) => client.request(call(at)), describe));
  return { sent, replies };
}

async function transaction(client) {
  const before = await client.getBlockNumber();
  const hash = await writer().sendTransaction({ to: task.recipient, value: BigInt(task.value) });
  const receipt = await client.waitForTransactionReceipt({ hash });
  const found = await client.getTransaction({ hash });
  const seen = {
    hash,
    succeeded: receipt.status === "success",
    block: receipt.blockNumber,
    cost: receipt.gasUsed * receipt.effectiveGasPrice,
    value: found.value,
    found_in: found.blockNumber,
    received: await client.getBalance({ address: task.recipient }),
    left: await client.getBalance({ address: account.address }),
    nonce: await client.getTransactionCount({ address: account.address }),
    heads: [before, receipt.blockNumber],
  };
  const logged = await writer().sendTransaction({ to: task.logger, data: task.topic });
  const { logs, blockNumber } = await client.waitForTransactionReceipt({ hash: logged });
  const found_logs = await client.getLogs({ address: task.logger, fromBlock: blockNumber });
  seen.logs = [logs, found_logs].map((list) => list.map((log) => [log.transactionHash, log.topics, log.data]));
  for (let round = 0; round < 5; round += 1) {
    seen.heads.push(...(await together(4, () => client.getBlockNumber({ cacheTime: 0 }), describe)));
  }
  return seen;
}

const plain = { to: task.recipient, value: 1n, gas: 21000n, maxFeePerGas: 10n ** 11n, maxPriorityFeePerGas: 1n };

function errors(client) {
  const poor = privateKeyToAccount(generatePrivateKey());
  const read = (functionName, value) =>
    client.readContract({ abi, address: task.reverter, functionName, args: [value] });
  const actions = {
    revert: () => client.call({ to: task.reverter, data: task.revert }),
    revert_bare: () => client.call({ to: task.reverter }),
    revert_estimate: () => client.estimateGas({ account: account.address, to: task.reverter, data: task.revert }),
    contract_revert: () => read("Error", "not today"),
    contract_panic: () => read("Panic", 17n),
    contract_custom: () => read("Custom", 42n),
    unknown_method: () => client.request({ method: "eth_nope" }),
    bad_params: () => client.request({ method: "eth_getBalance", params: ["0x1", "latest"] }),
    no_transaction: () => client.getTransaction({ hash: task.no_hash }),
    no_block: () => client.getBlock({ blockNumber: 10n ** 9n }),
    bad_key: () => reader(task.bad_key).getBlockNumber(),
    no_funds: () => writer(poor).sendTransaction({ ...plain, nonce: 0 }),
    nonce_too_low: () => writer().sendTransaction({ ...plain, nonce: 0 }),
  };
  return outcomes(actions, describe);
}

// An upstream that refuses every transaction, each time with another message.
async function refusals() {
  const seen = {};
  for (const [nonce, name] of task.refusals.entries()) {
    seen[name] = await outcome(() => writer(account, far).sendTransaction({ ...plain, nonce }), describe);
    if (typeof seen[name] === "string") {
      const signed = await account.signTransaction({ ...plain, nonce, chainId: far.id, type: "eip1559" });
      seen[name] = seen[name] === keccak256(signed);
    }
  }
  return seen;
}

async function limits() {
  const impatient = reader(task.tight_key, { retryCount: 0 });
  const refused = await outcome(async () => {
    for (let at = 0; at < 100; at += 1) await impatient.getGasPrice();
  }, describe);
  const batch = (key) => reader(key, { batch: true });
  const [free, enterprise] = [batch(task.free_key), batch(task.key)];
  return {
    refused,
    got: await together(15, () => reader(task.free_key).getGasPrice(), describe),
    large: await together(80, () => free.getGasPrice(), describe),
    many: await together(1000, () => enterprise.getGasPrice(), describe),
  };
}

const client = reader();
const seen = { reads: await reads(client), batches: await batches(), transaction: await transaction(client) };
show({ ...seen, errors: await errors(client), refusals: await refusals(), limits: await limits() });
