// bitcoin-core, the client of Bitcoin's users on npm, with the API key as the password.
import BitcoinCore from "bitcoin-core";
import { outcome, show, task } from "./harness.mjs";

const { default: Client = BitcoinCore } = BitcoinCore;
const client = new Client({ host: task.host, username: "any", password: task.password });
const describe = (error) => ({ name: error.name, code: error.code });

const hash = await client.command("getblockhash", 5);
const batch = await client.command([
  { method: "getblockhash", parameters: [9999999] },
  { method: "getblockcount", parameters: [] },
]);
show({
  height: await client.command("getblockcount"),
  info: await client.command("getblockchaininfo"),
  hash,
  block: await client.command("getblock", hash),
  batch: batch.map((each) => ({ name: each.constructor.name, value: each })),
  txid: await client.command("sendrawtransaction", task.raw),
  wrong: await outcome(() => client.command("getblockhash", 9999999), describe),
});
