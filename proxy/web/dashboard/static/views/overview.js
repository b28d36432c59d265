/* Usage: totals, charts over time, and a breakdown by network, method and key. Operators get the same view over all accounts. */

import { account, query } from "../api.js";
import { Chart } from "../chart.js";
import { bar, el, refreshChildren, setChildren, swatch } from "../dom.js";
import { button, empty, heading, note, poll, segmentedControl, table } from "../components.js";
import * as format from "../format.js";
import { firstSteps } from "./first-steps.js";

const RANGES = { live: "30 min", "3h": "3 h", "24h": "24 h", "7d": "7 d", "30d": "30 d", "90d": "90 d" };
const SECONDS = { live: 1800, "3h": 10800, "24h": 86400, "7d": 604800, "30d": 2592000, "90d": 7776000 };
// Seconds between refreshes of a range longer than 30 minutes: it changes slowly and costs more to read.
const SLOW_REFRESH_S = 15;

const ratio = (hits, requests) => hits.map((hit, at) => (requests[at] ? hit / requests[at] : null));
const spanOf = (range) => {
  const to = Math.floor(Date.now() / 1000);
  const iso = (seconds) => new Date(seconds * 1000).toISOString();
  return { from: iso(to - SECONDS[range]), to: iso(to) };
};

export async function show() {
  const { keys } = await account.get("/keys");
  const isNew = !keys.some((key) => key.last_used_at);
  return UsageView.open({ title: "Overview", client: account, by: { network: "Network", method: "Method", key: "Key" },
    before: isNew ? await firstSteps(keys.some((key) => key.status === "active")) : null });
}

// The settings of each view, by title. They last until the page is reloaded.
const settings = new Map();

export class UsageView {
  static async open(options) {
    const view = new UsageView(options);
    await view.load().catch((failure) => view.fail(failure));
    poll(view.node, 2, () => view.refresh());
    return view.node;
  }

  #charts = {
    requests: new Chart("Requests", { format: format.compact, syncKey: "usage" }),
    units: new Chart("Compute units", { format: format.compact, syncKey: "usage" }),
    latency: new Chart("Latency", { format: format.millis, syncKey: "usage" }),
    hits: new Chart("Cache hit rate", { format: format.percent, syncKey: "usage" }),
  };
  #tiles = el("div");
  #chips = el("div.filter");
  #table = el("div");
  #error = el("div");
  #flushSeconds = 5;
  #newest = 0;

  /* `before`: shown in place of empty charts until the first request. */
  constructor({ title, client, by, before = null }) {
    if (!settings.has(title)) settings.set(title, { range: "24h", by: Object.keys(by)[0], split: false, filters: {} });
    this.settings = settings.get(title);
    this.client = client;
    this.by = by;
    this.before = before;
    this.csv = el("a.button.small", { download: "usage.csv" }, "Export CSV");
    this.figures = el("div", null, this.#tiles, this.#chips, el("div.grid", null, Object.values(this.#charts).map(({ node }) => node)),
      this.#breakdown());
    this.node = el("div", null,
      heading(title, { actions: [segmentedControl("Time range", RANGES, this.settings.range, (range) => this.#change({ range })), client === account && this.csv] }),
      this.#error, before, this.figures);
  }

  #breakdown() {
    const split = el("input", { type: "checkbox", id: "split", onchange: () => this.#change({ split: split.checked }) });
    split.checked = this.settings.split;
    return el("section.card", { "aria-label": "Breakdown" },
      el("div.spread", null, el("h2", null, "Breakdown"),
        el("div.filter", null, el("span.check", null, split, el("label", { for: "split" }, "Split charts")),
          segmentedControl("Group by", this.by, this.settings.by, (by) => this.#change({ by })))),
      this.#table);
  }

  #change(change) {
    Object.assign(this.settings, change);
    this.load().catch((failure) => this.fail(failure));
  }

  /* Loads, and returns the seconds until the next refresh. */
  async refresh() {
    await this.load();
    return this.settings.range === "live" ? this.#flushSeconds : Math.max(SLOW_REFRESH_S, this.#flushSeconds);
  }

  fail(failure) {
    setChildren(this.#error, note(failure.message));
  }

  async load() {
    const number = ++this.#newest;
    const { range, filters, by } = this.settings;
    const span = spanOf(range);
    const params = { ...span, ...filters, step: range === "live" || range === "3h" ? "minute" : "auto" };
    const [live, total, groups] = await Promise.all([
      this.client.get("/live"),
      this.client.get(`/usage${query({ ...params, by: "total" })}`),
      this.client.get(`/usage${query({ ...params, by, top: 8 })}`),
    ]);
    if (number !== this.#newest) return;
    this.#flushSeconds = live.flush_s || this.#flushSeconds;
    this.csv.setAttribute("href", `/v1/account/usage/csv${query({ ...span, ...filters, step: total.step })}`);
    setChildren(this.#error);
    if (this.before) this.#hideUntilUsed(total.totals.requests);
    this.#showTiles(total.totals, live.today);
    this.#showChips(groups);
    this.#showCharts(total, groups);
    this.#showTable(groups);
  }

  #hideUntilUsed(requests) {
    this.figures.hidden = !requests;
    if (!requests) return;
    this.before.remove();
    this.before = null;
  }

  #showTiles(totals, today) {
    const tile = (name, figure, below) => el("div.tile", null,
      el("span.name", null, name), el("span.figure", null, figure), el("span.below", null, below));
    setChildren(this.#tiles, el("div.tiles", null,
      tile("Requests", format.compact(totals.requests), `last ${RANGES[this.settings.range]}`),
      tile("Errors", format.compact(totals.errors), totals.requests ? format.share(totals.errors, totals.requests) : ""),
      tile("Compute units", format.compact(totals.units), totals.requests ? `${format.compact(totals.units / totals.requests)} per request` : ""),
      tile("p50 latency", format.millis(totals.p50_ms), "median"),
      tile("p99 latency", format.millis(totals.p99_ms), "99th percentile"),
      tile("Cache hit rate", format.share(totals.hits, totals.requests), `${format.compact(totals.hits)} replies`)),
    today && quotaTile(today));
  }

  #showChips(groups) {
    const chips = Object.entries(this.settings.filters).map(([by, value]) => button([`${this.by[by]}: ${nameOf(value, groups)}`, " ×"], () => {
      const { [by]: _, ...rest } = this.settings.filters;
      this.#change({ filters: rest });
    }, { kind: "small", class: "small chip", "aria-label": `Remove filter ${this.by[by]}: ${nameOf(value, groups)}` }));
    refreshChildren(this.#chips, chips.length > 0 && el("span.hint", null, "Filters"), chips);
    this.#chips.classList.toggle("spread", chips.length > 0);
  }

  #showCharts(total, groups) {
    const split = this.settings.split && groups.series.length > 0;
    const lines = (pick, sumUp) => groups.series.map((each, at) => ({
      label: labelOf(each), colour: `series-${at}`, values: pick(each), total: sumUp(each.totals), soft: true }));
    const all = total.series[0] ?? { requests: [], errors: [], units: [], hits: [], p50_ms: [], p99_ms: [] };
    const { totals } = total;
    const shown = split ? {
      requests: lines((each) => each.requests, (sum) => format.compact(sum.requests)),
      units: lines((each) => each.units, (sum) => format.compact(sum.units)),
      latency: lines((each) => each.p99_ms, (sum) => format.millis(sum.p99_ms)),
      hits: lines((each) => ratio(each.hits, each.requests), (sum) => format.share(sum.hits, sum.requests)),
    } : {
      requests: [
        { label: "requests", colour: "series-0", values: all.requests, bars: true, total: format.compact(totals.requests) },
        { label: "errors", colour: "series-4", values: all.errors, bars: true, total: format.compact(totals.errors) },
      ],
      units: [{ label: "units", colour: "series-2", values: all.units, bars: true, total: format.compact(totals.units) }],
      latency: [
        { label: "p50", colour: "series-0", values: all.p50_ms, total: format.millis(totals.p50_ms) },
        { label: "p99", colour: "series-1", values: all.p99_ms, soft: true, total: format.millis(totals.p99_ms) },
      ],
      hits: [{ label: "of all replies", colour: "series-6", values: ratio(all.hits, all.requests), total: format.share(totals.hits, totals.requests) }],
    };
    for (const [name, series] of Object.entries(shown)) this.#charts[name].draw(split ? groups.times : total.times, series);
  }

  #showTable(groups) {
    const { by, split } = this.settings;
    if (!groups.series.length) {
      setChildren(this.#table, empty("No requests in this period", "Requests appear here within a few seconds.",
        el("a.button", { href: "#/explorer" }, "Open the explorer")));
      return;
    }
    const most = Math.max(...groups.series.map(({ totals }) => totals.requests), 1);
    const colour = (each) => split && swatch(`var(--series-${groups.series.indexOf(each)})`);
    refreshChildren(this.#table, table(`Usage by ${this.by[by].toLowerCase()}`, [
      { name: this.by[by], show: (each) => [colour(each), this.#filterButton(each)] },
      { name: "Requests", kind: "num", show: ({ totals }) => el("div", null, format.number(totals.requests), bar(totals.requests / most)) },
      { name: "Error rate", kind: "num", show: ({ totals }) => format.share(totals.errors, totals.requests) },
      { name: "Units", kind: "num", show: ({ totals }) => format.compact(totals.units) },
      { name: "p50", kind: "num", show: ({ totals }) => format.millis(totals.p50_ms) },
      { name: "p99", kind: "num", show: ({ totals }) => format.millis(totals.p99_ms) },
      { name: "Cache hit rate", kind: "num", show: ({ totals }) => format.share(totals.hits, totals.requests) },
    ], groups.series));
  }

  /* A group's name, which filters the whole view when clicked. */
  #filterButton(each) {
    if (each.name === "other" || each.name === "") return labelOf(each);
    return button(labelOf(each), () => {
      labels.set(each.name, labelOf(each));
      this.#change({ filters: { ...this.settings.filters, [this.settings.by]: each.name } });
    }, { kind: "link", title: "Filter by this" });
  }
}

const labels = new Map();
// The API's name for requests that belong to no network.
const NO_NETWORK = "-";
const labelOf = ({ name, label }) => (name === NO_NETWORK ? "No network" : label || name || "None");
const nameOf = (value, groups) => labels.get(value) ?? groups.series.find(({ name }) => name === value)?.label ?? value;

function quotaTile(today) {
  const limit = today.left === null ? null : today.used + today.left;
  const used = limit ? today.used / limit : 0;
  return el("div.tile.strip", { id: "quota" }, el("span.name", null, "Remaining today"),
    el("span.figure", null, limit === null ? "No daily limit" : format.number(today.left)),
    limit !== null && bar(used, used > 0.9 ? "bad" : used > 0.7 ? "wait" : ""),
    el("span.below", null, limit === null ? `${format.number(today.used)} requests today`
      : `${format.number(today.used)} of ${format.number(limit)} requests used. Resets ${format.ago(today.resets_at)}`));
}
