// Libraries and wallets that are given a URL and nothing else, each as its documentation starts: chain id, head and a balance.
import { task, show } from "./harness.mjs";

const CLIENTS = {
  async viem({ url, address }) {
    const { createPublicClient, http } = await import("viem");
    const client = createPublicClient({ transport: http(url) });
    return [await client.getChainId(), await client.getBlockNumber(), await client.getBalance({ address })];
  },

  async "viem batches"({ url, address }) {
    const { createPublicClient, http } = await import("viem");
    const client = createPublicClient({ transport: http(url, { batch: true }) });
    return Promise.all([client.getChainId(), client.getBlockNumber(), client.getBalance({ address })]);
  },

  async "viem socket"({ socket_url: url, address }) {
    const { createPublicClient, webSocket } = await import("viem");
    const client = createPublicClient({ transport: webSocket(url) });
    const seen = [await client.getChainId(), await client.getBlockNumber(), await client.getBalance({ address })];
    (await client.transport.getRpcClient()).close();
    return seen;
  },

  async ethers({ url, address }) {
    const { JsonRpcProvider } = await import("ethers");
    const provider = new JsonRpcProvider(url);
    const seen = [(await provider.getNetwork()).chainId, await provider.getBlockNumber(), await provider.getBalance(address)];
    provider.destroy();
    return seen;
  },

  async "ethers socket"({ socket_url: url, address }) {
    const { WebSocketProvider } = await import("ethers");
    const provider = new WebSocketProvider(url);
    const seen = [(await provider.getNetwork()).chainId, await provider.getBlockNumber(), await provider.getBalance(address)];
    await provider.destroy();
    return seen;
  },

  async wagmi({ url, address }) {
    const { createConfig, http } = await import("wagmi");
    const { getBalance, getBlockNumber } = await import("wagmi/actions");
    const { hardhat } = await import("wagmi/chains");
    // The default transport takes the URL of the chain.
    const chain = { ...hardhat, rpcUrls: { default: { http: [url] } } };
    const config = createConfig({ chains: [chain], transports: { [chain.id]: http() } });
    const chainId = await config.getClient().request({ method: "eth_chainId" });
    return [Number(chainId), await getBlockNumber(config), (await getBalance(config, { address })).value];
  },

  async "alchemy-sdk"({ url, address }) {
    const { Alchemy, Network } = await import("alchemy-sdk");
    const alchemy = new Alchemy({ url, network: Network.ETH_MAINNET });
    const chainId = await alchemy.core.send("eth_chainId", []);
    return [Number(chainId), await alchemy.core.getBlockNumber(), (await alchemy.core.getBalance(address)).toBigInt()];
  },

  // MetaMask's stack for a custom network, in the order in which its network client puts it together.
  async metamask({ url, address }) {
    const middleware = await import("@metamask/eth-json-rpc-middleware");
    const { providerFromEngine, providerFromMiddleware } = await import("@metamask/eth-json-rpc-provider");
    const { JsonRpcEngine } = await import("@metamask/json-rpc-engine");
    const { PollingBlockTracker } = await import("@metamask/eth-block-tracker");
    const fetching = middleware.createFetchMiddleware({ btoa, fetch, rpcUrl: url });
    const blockTracker = new PollingBlockTracker({ provider: providerFromMiddleware(fetching), pollingInterval: 1000 });
    const engine = new JsonRpcEngine();
    engine.push(middleware.createBlockRefRewriteMiddleware({ blockTracker }));
    engine.push(middleware.createBlockCacheMiddleware({ blockTracker }));
    engine.push(middleware.createInflightCacheMiddleware());
    engine.push(middleware.createBlockTrackerInspectorMiddleware({ blockTracker }));
    engine.push(fetching);
    const provider = providerFromEngine(engine);
    const ask = (method, params = []) => provider.request({ id: 1, jsonrpc: "2.0", method, params });
    // MetaMask accepts a network if its chain id is the one that the user entered, and net_version answers.
    const version = await ask("net_version");
    const seen = [Number(await ask("eth_chainId")), Number(await ask("eth_blockNumber")), BigInt(await ask("eth_getBalance", [address, "latest"]))];
    await blockTracker.destroy();
    if (Number(version) !== seen[0]) throw new Error(`net_version is ${version}`);
    return seen;
  },
};

const [chain_id, block, balance] = await CLIENTS[task.client](task);
show({ chain_id: BigInt(chain_id), block: BigInt(block), balance: BigInt(balance) });
