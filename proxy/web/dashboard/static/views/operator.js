/* Routes the operator pages. */

import { showAccounts } from "./accounts.js";
import { showAnnouncements } from "./announcements.js";
import { showAllErrors } from "./errors.js";
import { showFleet } from "./fleet.js";
import { showMethods } from "./methods.js";
import { showQueues } from "./queues.js";
import { showAllRequests } from "./requests.js";
import { showUpstreams } from "./upstreams.js";
import { showAllUsage } from "./usage.js";

const PAGES = { upstreams: showUpstreams, accounts: showAccounts, methods: showMethods, usage: showAllUsage, errors: showAllErrors, requests: showAllRequests, fleet: showFleet, queues: showQueues, announcements: showAnnouncements };

export const show = ([page, ...rest]) => (Object.hasOwn(PAGES, page) ? PAGES[page] : showUpstreams)(rest);
