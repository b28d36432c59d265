// @cosmjs/stargate, unmodified and with only a URL: state, a payment that it signs and follows into a block, and its search.
import { DirectSecp256k1HdWallet } from "@cosmjs/proto-signing";
import { GasPrice, SigningStargateClient, StargateClient } from "@cosmjs/stargate";
import { outcome, show, task } from "./harness.mjs";

const wallet = await DirectSecp256k1HdWallet.fromMnemonic(task.mnemonic);
const [{ address }] = await wallet.getAccounts();
const client = await StargateClient.connect(task.url);
const signer = await SigningStargateClient.connectWithSigner(task.url, wallet, { gasPrice: GasPrice.fromString("0stake") });
const before = await client.getBalance(task.to, "stake");
const sent = await signer.sendTokens(address, task.to, [{ denom: "stake", amount: "5" }], "auto", "from stargate");
const found = await client.getTx(sent.transactionHash);
const searched = await client.searchTx(`tx.height=${sent.height}`);
const block = await client.getBlock(sent.height);
show({
  address,
  chain: await client.getChainId(),
  code: sent.code,
  height: sent.height,
  found: found.height,
  searched: searched.map(({ hash }) => hash === sent.transactionHash),
  block: block.header.height,
  txs: block.txs.length,
  received: Number((await client.getBalance(task.to, "stake")).amount) - Number(before.amount),
  sequence: (await client.getSequence(address)).sequence,
  missing: await outcome(() => client.getBlock(999_999_999), (error) => error.message),
});
process.exit(0);
