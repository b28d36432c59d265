// Configuration of the development chain (hardhat 3). Environment variables:
//   PENSTOCK_DEVNET_DIR      directory for hardhat's files (default: .state next to this file)
//   PENSTOCK_BLOCK_TIME_MS   also mine a block at this interval in milliseconds (default 0: only one per transaction)
//   PENSTOCK_DEVNET_LOG      1: print each request and transaction (default: only the start-up lines)
//   PENSTOCK_DEVNET_TIED     1: exit when standard input (a pipe) closes, so that the node never outlives its parent
import path from "node:path";

const env = process.env;
env.HARDHAT_DISABLE_TELEMETRY = "true"; // callers set this too, which covers errors while this file loads
const state = path.resolve(env.PENSTOCK_DEVNET_DIR || path.join(import.meta.dirname, ".state"));

const interval = Number(env.PENSTOCK_BLOCK_TIME_MS || 0);
if (!Number.isSafeInteger(interval) || interval < 0) {
  throw new Error("PENSTOCK_BLOCK_TIME_MS must be a whole number of milliseconds, 0 or more");
}

if (env.PENSTOCK_DEVNET_TIED === "1") {
  const stop = () => process.exit(0);
  process.stdin.on("end", stop).on("close", stop).on("error", stop).resume();
}

// Hardhat's `node` task turns request logging on; keep it off unless PENSTOCK_DEVNET_LOG is set.
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
      // Keep the chain's clock at wall-clock time; otherwise each block advances it by a second or more.
      allowBlocksWithSameTimestamp: true,
      // Behave like a public node: a reverting transaction is mined and gets a hash and a failed receipt.
      throwOnTransactionFailures: false,
    },
  },
};
