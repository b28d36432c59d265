/* The usage of all accounts together, for operators: the charts of the overview, with accounts as one more way to split them. */

import { admin } from "../api.js";
import { Usage } from "./overview.js";

export const showAllUsage = () => Usage.open({
  title: "Usage",
  side: admin,
  by: { account: "Account", network: "Chain", method: "Method" },
});
