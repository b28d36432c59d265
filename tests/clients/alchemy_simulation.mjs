// Simulations by Alchemy's SDK with its URL changed, and the key in a header.
import { Alchemy } from "alchemy-sdk";

import { outcomes, show, task } from "./harness.mjs";

const { transact } = new Alchemy({
  url: task.url,
  maxRetries: 1,
  connectionInfoOverrides: { headers: { "X-API-Key": task.key } },
});

show(
  await outcomes(
    {
      transfer: () => transact.simulateAssetChanges(task.transfer),
      bundle: () => transact.simulateAssetChangesBundle([task.transfer, task.approve, task.fails], "latest"),
      execution: () => transact.simulateExecution(task.transfer),
    },
    (error) => ({ message: error.message }),
  ),
);
