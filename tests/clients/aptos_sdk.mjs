// @aptos-labs/ts-sdk, unmodified.
import { Account, Aptos, AptosConfig, Network } from "@aptos-labs/ts-sdk";
import { outcome, show, task } from "./harness.mjs";

const config = new AptosConfig({ network: Network.CUSTOM, fullnode: `${task.url}/v1`, clientConfig: { API_KEY: task.key } });
const aptos = new Aptos(config);
const describe = (error) => ({ status: error.status, code: error.data?.error_code });
const sender = Account.generate();
const transaction = await aptos.transferCoinTransaction({ sender: sender.accountAddress, recipient: "0x2", amount: 5 });
const sent = await aptos.signAndSubmitTransaction({ signer: sender, transaction });
const resourceType = "0x1::coin::CoinStore<0x1::aptos_coin::AptosCoin>";

show({
  chain: await aptos.getChainId(),
  ledger: await aptos.getLedgerInfo(),
  block: await aptos.getBlockByHeight({ blockHeight: 200 }),
  account: await aptos.getAccountInfo({ accountAddress: "0x1" }),
  then: await aptos.getAccountResource({ accountAddress: "0x1", resourceType, options: { ledgerVersion: 2000 } }),
  now: await aptos.getAccountResource({ accountAddress: "0x1", resourceType }),
  balance: await aptos.getBalance({ accountAddress: "0x1", asset: "0x1::aptos_coin::AptosCoin" }),
  view: await aptos.viewJson({ payload: { function: "0x1::chain_id::get", functionArguments: [] } }),
  sent: sent.hash,
  done: await aptos.waitForTransaction({ transactionHash: sent.hash }),
  absent: await outcome(() => aptos.getAccountInfo({ accountAddress: `0x${"0".repeat(60)}dead` }), describe),
  missing: await outcome(() => aptos.getBlockByHeight({ blockHeight: 100_000 }), describe),
});
