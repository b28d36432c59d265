// The event stream of @lodestar/api, unmodified. Its client sends no headers, so the key is in the URL.
import { getClient } from "@lodestar/api";
import { createChainForkConfig, defaultChainConfig } from "@lodestar/config";
import { show, task } from "./harness.mjs";

const config = createChainForkConfig(defaultChainConfig);
const api = getClient({ baseUrl: task.url }, { config });
const events = [];
const stop = new AbortController();
await new Promise((resolve, reject) => {
  api.events.eventstream({
    topics: task.topics,
    signal: stop.signal,
    onError: reject,
    onEvent: ({ type, message }) => {
      events.push([type, message.slot ?? message.epoch]);
      if (events.length === task.events) resolve();
    },
  });
});
stop.abort();
show({ events });
process.exit(0);
