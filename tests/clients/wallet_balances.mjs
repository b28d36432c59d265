// The SDKs of Ankr and QuickNode, unmodified, with a URL that has the key in it.
import { createRequire } from "node:module";

import { AnkrProvider } from "@ankr.com/ankr.js";
import { hardhat } from "viem/chains";

import { outcomes, show, task } from "./harness.mjs";

// As a module it imports a chain that newer versions of viem no longer have, and does not load.
const { Core } = createRequire(import.meta.url)("@quicknode/sdk");

const ankr = new AnkrProvider(task.url);
// The SDK derives the chain from QuickNode's own hosts only: for others it is given.
const quicknode = new Core({ endpointUrl: task.url, chain: hardhat, config: { addOns: { nftTokenV2: true } } });

async function everyAsset() {
  const found = [];
  let pageToken;
  do {
    const page = await ankr.getAccountBalance({ walletAddress: task.holder, pageSize: 1, pageToken });
    found.push(...page.assets);
    pageToken = page.nextPageToken;
  } while (pageToken);
  return found;
}

show(
  await outcomes(
    {
      ankr: () => ankr.getAccountBalance({ walletAddress: task.holder, blockchain: [task.network] }),
      ankr_pages: everyAsset,
      ankr_unknown: () => ankr.getAccountBalance({ walletAddress: task.holder, blockchain: "atlantis" }),
      quicknode: () => quicknode.client.qn_getWalletTokenBalance({ wallet: task.holder }),
      quicknode_page: () => quicknode.client.qn_getWalletTokenBalance({ wallet: task.holder, page: 2, perPage: 1, contracts: null }),
      quicknode_block: () => quicknode.client.getBlockNumber(),
    },
    (error) => ({ message: error.message }),
  ),
);
