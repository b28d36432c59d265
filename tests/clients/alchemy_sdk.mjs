// Alchemy's SDK with its URL changed, and the key in a header.
import { Alchemy } from "alchemy-sdk";

import { outcomes, show, task } from "./harness.mjs";

const alchemy = new Alchemy({
  url: task.url,
  maxRetries: 1,
  connectionInfoOverrides: { headers: { "X-API-Key": task.key } },
});
// The same with nothing but a URL of Alchemy's form.
const { nft } = new Alchemy({ url: task.alias_url, maxRetries: 1 });
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

async function everyNft() {
  const found = [];
  for await (const each of nft.getNftsForOwnerIterator(task.holder)) found.push(each);
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
      nfts: () => nft.getNftsForOwner(task.holder),
      nfts_of_contract: () => nft.getNftsForOwner(task.holder, { contractAddresses: [task.nft, task.token], pageSize: 1 }),
      second_page: () => nft.getNftsForOwner(task.holder, { omitMetadata: true, pageSize: 1, pageKey: "2-1" }),
      every_nft: everyNft,
      nft: () => nft.getNftMetadata(task.nft, task.nft_id),
      contract: () => nft.getContractMetadata(task.nft),
      no_nft: () => nft.getNftMetadata(task.holder, 1),
      spam: () => nft.getNftsForOwner(task.holder, { excludeFilters: ["SPAM"] }),
      external: () => alchemy.core.getAssetTransfers({ ...asked, category: ["external"] }),
    },
    (error) => ({ message: error.message }),
  ),
);
