// @lodestar/api, unmodified.
import { getClient } from "@lodestar/api";
import { createChainForkConfig, defaultChainConfig } from "@lodestar/config";
import { show, task } from "./harness.mjs";

const config = createChainForkConfig(defaultChainConfig);
const api = getClient({ baseUrl: task.url, globalInit: { headers: { "X-API-Key": task.key } } }, { config });
const hex = (bytes) => (typeof bytes === "string" ? bytes : `0x${Buffer.from(bytes).toString("hex")}`);
const genesis = (await api.beacon.getGenesis()).value();
const header = await api.beacon.getBlockHeader({ blockId: task.slot });
show({
  genesis: hex(genesis.genesisValidatorsRoot),
  root: hex(header.value().root),
  finalized: header.meta().finalized,
  version: (await api.node.getNodeVersion()).value().version,
  absent: (await api.beacon.getBlockHeader({ blockId: 99_999 })).status,
});
process.exit(0);
