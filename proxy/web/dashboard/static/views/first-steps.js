/* What a new account does first: make a key, send a request, see it arrive, add a webhook. Shown until the first request. */

import { el } from "../dom.js";
import { card, codeBlock } from "../components.js";
import { networks } from "../networks.js";

const step = (number, title, ...inside) => el("li.step", null, el("h3", null, `${number}. ${title}`), ...inside);

/* A request to the first network that the account can call. */
function firstCall({ network, samples: [call] }) {
  const body = JSON.stringify({ jsonrpc: "2.0", id: 1, ...call });
  return `export PENSTOCK_KEY=svc_live_…\ncurl ${location.origin}/v1/rpc/${network} \\\n  -H "X-API-Key: $PENSTOCK_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

export async function firstSteps(hasKey) {
  const [first] = await networks();
  return card("First steps", el("ol.steps", null,
    step(1, hasKey ? "You have an API key" : "Make an API key",
      el("p", null, hasKey ? "It was shown once, when it was made. Lost it? " : "It is shown once. Keep it on your server. ",
        el("a", { href: "#/keys" }, hasKey ? "Make another" : "Make a key"))),
    step(2, "Send a request", first ? codeBlock("A request to paste", firstCall(first)).node : el("p", null, "No network is configured yet.")),
    step(3, "See it arrive", el("p", null, "This page shows your usage as soon as the request is counted, within a few seconds.")),
    step(4, "Add a webhook", el("p", null, "Get an HTTP request for each event on the chain, and send yourself a test. ",
      el("a", { href: "#/webhooks" }, "Add a webhook")))));
}
