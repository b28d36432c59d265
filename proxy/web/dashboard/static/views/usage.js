/* Usage across all accounts, for operators: the charts of the overview, with a breakdown by account. */

import { admin } from "../api.js";
import { UsageView } from "./overview.js";

export const showForOperators = () => UsageView.open({
  title: "Usage",
  client: admin,
  paths: { overview: "operator/usage", errors: "operator/errors" },
  by: { account: "Account", network: "Network", method: "Method" },
});
