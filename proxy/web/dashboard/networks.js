/* The networks that there are to choose from, as the account knows them. */

import { account } from "./api.js";
import * as forms from "./forms.js";

let known = null;

/* [{network, title, family, class}…]; none for an operator, who types the name. */
export async function networks() {
  if (account.isOpen) known ??= account.get("").then((said) => said.networks).catch(() => { known = null; return []; });
  return (await known) ?? [];
}

const group = { live: "Mainnets", test: "Testnets" };

/* One of them by `valueOf`, in groups of their class; typed where none is known. */
export function networkField(label, choices, { valueOf, hint, placeholder }) {
  if (!choices.length) return forms.text(label, { required: true, hint, placeholder });
  const options = {};
  for (const each of choices) (options[group[each.class]] ??= {})[valueOf(each.network)] = `${each.network} · ${each.title}`;
  return forms.select(label, options);
}

/* How a body names a network outright: ethereum-sepolia. */
export const wordOf = (network) => network.replace("/", "-");
