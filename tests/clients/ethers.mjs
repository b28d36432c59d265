// A program written with ethers: reads, batches (which ethers builds by itself), a transaction, and every kind of error.
import { Contract, FetchRequest, JsonRpcProvider, Wallet, keccak256 } from "ethers";
import { call, outcome, outcomes, show, task, together } from "./harness.mjs";

const abi = ["function Error(string) view", "function Panic(uint256) view", "function Custom(uint256) view"];
const opened = [];

function connection(key, url = task.url) {
  const request = new FetchRequest(url);
  request.setHeader("X-API-Key", key);
  return request;
}

function open(request = connection(task.key)) {
  const provider = new JsonRpcProvider(request);
  opened.push(provider);
  return provider;
}

// ethers distinguishes errors by their code; the service's reply is in `info`.
function describe(error) {
  return {
    types: [error.code],
    message: `${error.message} ${error.info?.responseBody ?? ""}`,
    rpc_code: (error.info?.error ?? error.error)?.code,
    status: error.response?.statusCode,
    data: error.data,
    reason: error.reason,
  };
}

async function reads(client) {
  const block = await client.getBlock(task.block, true);
  const fees = await client.send("eth_feeHistory", ["0x4", "latest", [25, 75]]);
  const logs = await client.getLogs({ address: task.logger, fromBlock: 0, toBlock: "latest" });
  return {
    chain_id: (await client.getNetwork()).chainId,
    block_number: await client.getBlockNumber(),
    block: { hash: block.hash, transactions: block.prefetchedTransactions.map((made) => [made.hash, made.gasLimit]) },
    balance: await client.getBalance(wallet.address),
    nonce: await client.getTransactionCount(wallet.address),
    gas: await client.estimateGas({ from: wallet.address, to: task.logger, data: task.topic }),
    gas_price: (await client.getFeeData()).gasPrice,
    code: await client.getCode(task.logger),
    fees: {
      oldest: BigInt(fees.oldestBlock),
      base: fees.baseFeePerGas.map(BigInt),
      reward: fees.reward.map((ofBlock) => ofBlock.map(BigInt)),
    },
    logs: logs.map((log) => [log.blockNumber, log.transactionHash, log.topics, log.data]),
  };
}

async function batches() {
  const client = open();
  await client.send("eth_chainId", []);
  const sent = [];
  await client.on("debug", ({ action, payload }) => {
    if (action === "sendRpcPayload") sent.push(payload.length ?? 1);
  });
  const replies = [];
  for (const size of task.batches) replies.push(await together(size, (at) => client.send(call(at).method, call(at).params), describe));
  return { sent, replies };
}

async function transaction(client) {
  const before = await client.getBlockNumber();
  const paid = await wallet.sendTransaction({ to: task.recipient, value: BigInt(task.value) });
  const receipt = await paid.wait();
  // A provider caches reads for a quarter of a second: a new one reads again.
  const later = open();
  const found = await later.getTransaction(paid.hash);
  const seen = {
    hash: paid.hash,
    succeeded: receipt.status === 1,
    block: receipt.blockNumber,
    cost: receipt.fee,
    value: found.value,
    found_in: found.blockNumber,
    received: await later.getBalance(task.recipient),
    left: await later.getBalance(wallet.address),
    nonce: await later.getTransactionCount(wallet.address),
    heads: [before, receipt.blockNumber],
  };
  const sent = await wallet.connect(later).sendTransaction({ to: task.logger, data: task.topic });
  const { logs, blockNumber } = await sent.wait();
  const found_logs = await later.getLogs({ address: task.logger, fromBlock: blockNumber });
  seen.logs = [logs, found_logs].map((list) => list.map((log) => [log.transactionHash, log.topics, log.data]));
  for (let at = 0; at < 20; at += 1) seen.heads.push(BigInt(await later.send("eth_blockNumber", [])));
  return seen;
}

const plain = { to: task.recipient, value: 1n, gasLimit: 21000n, maxFeePerGas: 10n ** 11n, maxPriorityFeePerGas: 1n };

function errors(client) {
  const poor = Wallet.createRandom().connect(client);
  const contract = new Contract(task.reverter, abi, client);
  const actions = {
    revert: () => client.call({ to: task.reverter, data: task.revert }),
    revert_bare: () => client.call({ to: task.reverter }),
    revert_estimate: () => client.estimateGas({ from: wallet.address, to: task.reverter, data: task.revert }),
    contract_revert: () => contract.getFunction("Error")("not today"),
    contract_panic: () => contract.getFunction("Panic")(17n),
    contract_custom: () => contract.getFunction("Custom")(42n),
    unknown_method: () => client.send("eth_nope", []),
    bad_params: () => client.send("eth_getBalance", ["0x1", "latest"]),
    no_transaction: () => client.getTransaction(task.no_hash),
    no_block: () => client.getBlock(10 ** 9),
    bad_key: () => open(connection(task.bad_key)).getBlockNumber(),
    no_funds: () => poor.sendTransaction({ ...plain, nonce: 0 }),
    nonce_too_low: () => wallet.sendTransaction({ ...plain, nonce: 0 }),
  };
  return outcomes(actions, describe);
}

// An upstream that refuses every transaction, each time with another message.
async function refusals() {
  const client = open(connection(task.key, task.far_url));
  const seen = {};
  for (const [nonce, name] of task.refusals.entries()) {
    const signed = await wallet.signTransaction({ ...plain, nonce, type: 2, chainId: task.far_chain_id });
    seen[name] = await outcome(() => client.send("eth_sendRawTransaction", [signed]), describe);
    if (typeof seen[name] === "string") seen[name] = seen[name] === keccak256(signed);
  }
  return seen;
}

async function limits() {
  const impatient = open(connection(task.tight_key));
  const refused = await outcome(async () => {
    for (let at = 0; at < 100; at += 1) await impatient.send("eth_gasPrice", []);
  }, describe);
  // By default ethers takes the seconds of Retry-After for milliseconds, and gives up after twelve attempts.
  const waiting = connection(task.free_key);
  waiting.retryFunc = async (_, response) => {
    await new Promise((resolve) => setTimeout(resolve, 1000 * Number(response.headers["retry-after"])));
    return true;
  };
  const patient = open(waiting);
  const got = [];
  for (let at = 0; at < 15; at += 1) got.push(await outcome(async () => BigInt(await patient.send("eth_gasPrice", [])), describe));
  return {
    refused,
    got,
    large: await together(80, async () => BigInt(await patient.send("eth_gasPrice", [])), describe),
    many: await together(1000, async () => BigInt(await client.send("eth_gasPrice", [])), describe),
  };
}

const client = open();
const wallet = new Wallet(task.private_key, client);
const seen = { reads: await reads(client), batches: await batches(), transaction: await transaction(client) };
show({ ...seen, errors: await errors(client), refusals: await refusals(), limits: await limits() });
for (const provider of opened) provider.destroy();
