// Starts Hardhat nodes in one process and prints their ports as JSON. They mine only when asked, and end with standard input.
// Arguments: the directory with Hardhat's packages, the time of the first block, and the chain id of each node.
import path from "node:path";

const [directory, time, ...chainIds] = process.argv.slice(2);
process.env.HARDHAT_DISABLE_TELEMETRY = "true";
process.stdin.on("end", () => process.exit(0)).on("close", () => process.exit(0)).resume();

const { createHardhatRuntimeEnvironment } = await import(
  path.join(directory, "node_modules/hardhat/dist/src/hre.js")
);
const network = (chainId) => ({
  type: "edr-simulated",
  chainType: "l1",
  chainId,
  initialDate: new Date(Number(time) * 1000),
  mining: { auto: false, interval: 0 },
});
const networks = Object.fromEntries(chainIds.map((id, place) => [`node${place}`, network(Number(id))]));
const hardhat = await createHardhatRuntimeEnvironment({ networks }, {}, directory);
const ports = [];
for (const name of Object.keys(networks)) {
  const server = await hardhat.network.createServer(name, "127.0.0.1", 0);
  ports.push((await server.listen()).port);
}
console.log(JSON.stringify(ports));
