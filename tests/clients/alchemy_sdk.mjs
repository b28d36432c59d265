// Alchemy's SDK with its URL changed, and the key in a header.
import { Alchemy } from "alchemy-sdk";

import { outcomes, show, task } from "./harness.mjs";

const alchemy = new Alchemy({
  url: task.url,
  maxRetries: 1,
  connectionInfoOverrides: { headers: { "X-API-Key": task.key } },
});
const asked = { toAddress: task.holder, category: ["erc20", "erc721", "erc1155"], withMetadata: true };

async function everyPage() {
  const found = [];
  let pageKey;
  do {
    const page = await alchemy.core.getAssetTransfers({ ...asked, maxCount: 3, pageKey });
    found.push(...page.transfers);
    pageKey = page.pageKey;
  } while (pageKey);
  return found;
}

show(
  await outcomes(
    {
      transfers: async () => (await alchemy.core.getAssetTransfers(asked)).transfers,
      pages: everyPage,
      balances: async () => (await alchemy.core.getTokenBalances(task.holder)).tokenBalances,
      balance: async () => (await alchemy.core.getTokenBalances(task.holder, [task.token])).tokenBalances,
      metadata: () => alchemy.core.getTokenMetadata(task.token),
      receipts: async () => (await alchemy.core.getTransactionReceipts({ blockNumber: task.block })).receipts,
      owned: async () => (await alchemy.core.getTokensForOwner(task.holder)).tokens,
      external: () => alchemy.core.getAssetTransfers({ ...asked, category: ["external"] }),
    },
    (error) => ({ message: error.message }),
  ),
);
