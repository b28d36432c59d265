/* Common JSON-RPC methods with sample params, offered as suggestions in the explorer. */

const ADDRESS = "0xd8dA6BF26964aF9D7eEd9e03E53415D37aA96045";
const TOKEN = "0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB48";
const HASH = `0x${"00".repeat(32)}`;
const SOLANA_ADDRESS = "11111111111111111111111111111111";

export const METHODS = {
  evm: {
    eth_blockNumber: [],
    eth_chainId: [],
    eth_getBalance: [ADDRESS, "latest"],
    eth_getBlockByNumber: ["latest", false],
    eth_getTransactionCount: [ADDRESS, "latest"],
    eth_call: [{ to: TOKEN, data: `0x70a08231${"0".repeat(24)}${ADDRESS.slice(2).toLowerCase()}` }, "latest"],
    eth_estimateGas: [{ to: ADDRESS, value: "0x1" }],
    eth_gasPrice: [],
    eth_feeHistory: ["0x5", "latest", [25, 75]],
    eth_maxPriorityFeePerGas: [],
    eth_getCode: [TOKEN, "latest"],
    eth_getStorageAt: [TOKEN, "0x0", "latest"],
    eth_getLogs: [{ fromBlock: "latest", toBlock: "latest" }],
    eth_getTransactionByHash: [HASH],
    eth_getTransactionReceipt: [HASH],
    net_version: [],
    web3_clientVersion: [],
  },
  svm: {
    getSlot: [],
    getBlockHeight: [],
    getBalance: [SOLANA_ADDRESS],
    getAccountInfo: [SOLANA_ADDRESS, { encoding: "base64" }],
    getLatestBlockhash: [],
    getHealth: [],
    getVersion: [],
  },
};
