// More calls at once than a Free key may make in a second, with libraries that are set up as their guides say.
import { FetchRequest, JsonRpcProvider } from "ethers";
import { createPublicClient, http } from "viem";
import { outcome, show, task, together } from "./harness.mjs";

const describe = (error) => `${error.code ?? error.name}: ${error.shortMessage ?? error.message}`;
const address = (at) => "0x" + (0xabc000 + at).toString(16).padStart(40, "0");

function ethers(key) {
  const request = new FetchRequest(task.url);
  request.setHeader("X-API-Key", key);
  return new JsonRpcProvider(request);
}

function viem(key) {
  return createPublicClient({ transport: http(task.url, { batch: true, fetchOptions: { headers: { "X-API-Key": key } } }) });
}

// How many of these calls were answered, and the errors of the others.
async function answered(count, action) {
  const replies = await together(count, action, describe);
  const errors = replies.filter((reply) => typeof reply === "string");
  return { answered: replies.length - errors.length, errors: [...new Set(errors)] };
}

async function with_ethers(key, action, count) {
  const provider = ethers(key);
  const seen = await answered(count, (at) => action(provider, at));
  provider.destroy();
  return seen;
}

const send = async (provider) => BigInt(await provider.send("eth_gasPrice", []));
const balance = (provider, at) => provider.getBalance(address(at));

async function with_viem(key, count) {
  const client = viem(key);
  return answered(count, (at) => client.getBalance({ address: address(at) }));
}

const runs = {
  "ethers, 99 calls": () => with_ethers(task.keys[0], send, 99),
  "ethers, 200 calls": () => with_ethers(task.keys[1], send, 200),
  "ethers, 150 balances": () => with_ethers(task.keys[2], balance, 150),
  "viem, 200 balances": () => with_viem(task.keys[3], 200),
};
const all = Object.entries(runs).map(async ([name, run]) => [name, await outcome(run, describe)]);
show(Object.fromEntries(await Promise.all(all)));
