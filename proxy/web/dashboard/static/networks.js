/* The networks that the account can call, and a form field to pick one. */

import { account } from "./api.js";
import * as forms from "./forms.js";

let loading = null;

/* [{network, title, class, features, samples}…]. Empty for an operator without an account, who types the name instead.
   `samples` are calls to try, [{method, params}…]; the first returns the head. */
export async function networks() {
  if (account.isSignedIn) loading ??= account.get("").then(withSamples).catch(() => { loading = null; return []; });
  return (await loading) ?? [];
}

const withSamples = ({ networks, methods }) => networks.map((each) => ({ ...each, samples: methods[each.family] }));

/* The networks that have a feature, such as "webhooks". */
export const networksWith = async (feature) => (await networks()).filter(({ features }) => features.includes(feature));

const GROUPS = { live: "Mainnets", test: "Testnets" };

/* A select with mainnets and testnets in groups, or a text field when no networks are known. `valueOf` maps a network to the field's value. */
export function networkField(label, choices, { valueOf, hint, placeholder }) {
  if (!choices.length) return forms.text(label, { required: true, hint, placeholder });
  const options = {};
  for (const each of choices) (options[GROUPS[each.class]] ??= {})[valueOf(each.network)] = `${each.network} · ${each.title}`;
  return forms.select(label, options);
}

/* The network that `chain` means in a reply to a signed-in person: `ethereum` is ethereum/mainnet. One that is no longer configured
   keeps its name. */
export const networkOf = (chain, all) => all.find((each) => chainNameOf(each.network) === chain
  || (each.class === "live" && each.network.split("/")[0] === chain))?.network ?? chain;

/* The name of a network in the `chain` member of a request body: ethereum-sepolia. */
export const chainNameOf = (network) => network.replace("/", "-");
