// @polkadot/api over HTTP, unmodified.
import { ApiPromise, HttpProvider } from "@polkadot/api";
import { show, task } from "./harness.mjs";

const provider = new HttpProvider(task.url, { "X-API-Key": task.key });
const api = await ApiPromise.create({ provider, noInitWarn: true, throwOnConnect: true });
const header = await api.rpc.chain.getHeader();
const old = await api.rpc.chain.getBlockHash(100);
const at = await api.at(old);
show({
  chain: (await api.rpc.system.chain()).toString(),
  genesis: api.genesisHash.toHex(),
  runtime: api.runtimeVersion.specName.toString(),
  pallets: Object.keys(api.query).length,
  number: header.number.toNumber(),
  old: old.toHex(),
  then: Number((await at.query.timestamp.now()).toBigInt()),
  now: Number((await api.query.timestamp.now()).toBigInt()),
  finalized: (await api.rpc.chain.getFinalizedHead()).toHex(),
});
process.exit(0);
