// tronweb, unmodified.
import { TronWeb } from "tronweb";
import { outcome, show, task } from "./harness.mjs";

const privateKey = "01".repeat(32);
const tron = new TronWeb({ fullHost: task.url, headers: { "X-API-Key": task.key }, privateKey });
const describe = (error) => ({ message: error.message ?? String(error) });
const address = tron.defaultAddress.base58;
const contract = "TR7NHqjeKQxGTCi8q8ZY4pL8otSzgjLj6t";
const unsigned = await tron.transactionBuilder.sendTrx(contract, 5, address);
const signed = await tron.trx.sign(unsigned);
const called = await tron.transactionBuilder.triggerConstantContract(contract, "decimals()", {}, [], address);

show({
  now: await tron.trx.getCurrentBlock(),
  confirmed: await tron.trx.getConfirmedCurrentBlock(),
  old: await tron.trx.getBlock(200),
  range: (await tron.trx.getBlockRange(10, 12)).map((block) => block.blockID),
  balance: await tron.trx.getUnconfirmedBalance(address),
  info: await tron.trx.getTransactionInfo(task.transaction),
  parameters: await tron.trx.getChainParameters(),
  called: called.constant_result,
  id: signed.txID,
  sent: await tron.trx.sendRawTransaction(signed),
  missing: await outcome(() => tron.trx.getBlock(100_000), describe),
  nodes: await outcome(() => tron.trx.listNodes(), describe),
});
