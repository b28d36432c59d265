// The development chain. Read by hardhat 3; everything it needs comes from here and from the environment:
//   PENSTOCK_DEVNET_DIR      directory for what hardhat writes (default: .state beside this file)
//   PENSTOCK_BLOCK_TIME_MS   also mine a block every so many milliseconds (default 0: only one per transaction)
//   PENSTOCK_DEVNET_LOG      1: print each request and transaction (default: only the start-up lines)
//   PENSTOCK_DEVNET_TIED     1: end when standard input (a pipe) closes, so that the node never outlives its parent
import path from "node:path";

const env = process.env;
env.HARDHAT_DISABLE_TELEMETRY = "true"; // whoever starts it sets this too: it then also covers a failure to read this file
const state = path.resolve(env.PENSTOCK_DEVNET_DIR || path.join(import.meta.dirname, ".state"));

const interval = Number(env.PENSTOCK_BLOCK_TIME_MS || 0);
if (!Number.isSafeInteger(interval) || interval < 0) {
  throw new Error("PENSTOCK_BLOCK_TIME_MS must be a whole number of milliseconds, 0 or more");
}

if (env.PENSTOCK_DEVNET_TIED === "1") {
  const stop = () => process.exit(0);
  process.stdin.on("end", stop).on("close", stop).on("error", stop).resume();
}

// Hardhat's `node` task turns request logging on; this leaves it off unless asked for.
const quiet = {
  id: "penstock-quiet",
  hookHandlers: {
    network: async () => ({
      default: async () => ({
        onRequest: (context, connection, request, next) =>
          request.method === "hardhat_setLoggingEnabled" && env.PENSTOCK_DEVNET_LOG !== "1"
            ? { jsonrpc: "2.0", id: request.id, result: true }
            : next(context, connection, request),
      }),
    }),
  },
};

export default {
  plugins: [quiet],
  paths: {
    sources: path.join(state, "contracts"),
    tests: path.join(state, "test"),
    cache: path.join(state, "cache"),
    artifacts: path.join(state, "artifacts"),
  },
  networks: {
    node: {
      type: "edr-simulated",
      chainType: "l1",
      chainId: 31337,
      blockGasLimit: 60_000_000,
      mining: { auto: true, interval },
      // Keep the chain's clock at the wall clock: otherwise each block advances it by a second or more.
      allowBlocksWithSameTimestamp: true,
      // Like a public node: a transaction that reverts is mined and has its hash and a failed receipt.
      throwOnTransactionFailures: false,
    },
  },
};
