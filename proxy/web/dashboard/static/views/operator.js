/* Routes the operator pages. Each is loaded on first use. */

const PAGES = {
  overview: () => import("./operator-overview.js"),
  upstreams: () => import("./upstreams.js"),
  accounts: () => import("./accounts.js"),
  methods: () => import("./methods.js"),
  usage: () => import("./usage.js"),
  costs: () => import("./costs.js"),
  errors: () => import("./errors.js"),
  requests: () => import("./requests.js"),
  fleet: () => import("./fleet.js"),
  queues: () => import("./queues.js"),
  audit: () => import("./audit.js"),
  announcements: () => import("./announcements.js"),
};

export async function show([page, ...rest]) {
  const { showForOperators } = await (Object.hasOwn(PAGES, page) ? PAGES[page] : PAGES.overview)();
  return showForOperators(rest);
}
