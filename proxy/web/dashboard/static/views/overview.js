/* Usage: totals, charts over time, and a breakdown by network, method and key. Operators get the same view over all accounts. */

import { account, query } from "../api.js";
import { Chart } from "../chart.js";
import { bar, el, nextTask, refreshChildren, setChildren, swatch } from "../dom.js";
import { button, empty, heading, note, poll, segmentedControl, table, tile } from "../components.js";
import * as format from "../format.js";
import { linkTo, place, setParams } from "../location.js";
import { rangeBetween, rangeControl, rangeIn, rangeName, rangeParams, spanOf, stepOf, usualRange } from "../ranges.js";
import { firstSteps } from "./first-steps.js";

// Seconds between refreshes of a range longer than 30 minutes: it changes slowly and costs more to read.
const SLOW_REFRESH_S = 15;
// Usage may be flushed many times a second, but nobody reads so fast.
const LEAST_REFRESH_S = 1;

const ratio = (hits, requests) => hits.map((hit, at) => (requests[at] ? hit / requests[at] : null));
const STEPS = { minute: 60, hour: 3600, day: 86400 };
// Groups in charts, and in the table that "other" leads to.
const [SHOWN, ALL] = [8, 100];

export const show = () => UsageView.open({ title: "Overview", client: account, by: { network: "Network", method: "Method", key: "Key" },
  paths: { overview: "overview", errors: "errors" }, loadFirstSteps });

/* The first steps, while no key has been used. */
async function loadFirstSteps() {
  const { keys } = await account.get("/keys");
  return keys.some((key) => key.last_used_at) ? null : firstSteps(keys.some((key) => key.status === "active"));
}

// The params of each view, by path. They last until the page is reloaded.
const remembered = new Map();

function settingsIn(params, by, usual) {
  return {
    ...rangeIn(params, usual),
    by: Object.hasOwn(by, params.by) ? params.by : Object.keys(by)[0],
    split: params.split === "1",
    all: params.all === "1",
    filters: Object.fromEntries(Object.keys(by).filter((name) => params[name]).map((name) => [name, params[name]])),
  };
}

const paramsOf = (settings) => ({ ...rangeParams(settings), by: settings.by, split: settings.split ? "1" : "", all: settings.all ? "1" : "",
  ...settings.filters });

export class UsageView {
  /* `loadFirstSteps` returns what is shown instead of empty charts until the first request, or null. */
  static async open({ loadFirstSteps = async () => null, ...options }) {
    const view = new UsageView(options);
    const [steps] = await Promise.all([loadFirstSteps().catch(() => null), view.load().catch((failure) => view.fail(failure))]);
    if (steps) view.showFirst(steps);
    poll(view.node, view.flushSeconds, () => view.refresh());
    return view.node;
  }

  #charts = {
    requests: this.#chart("Requests", format.compact, true),
    units: this.#chart("Compute units", format.compact, true),
    latency: this.#chart("Latency", format.millis),
    hits: this.#chart("Cache hit rate", format.percent),
  };
  #tiles = el("div");
  #chips = el("div.filter");
  #table = el("div");
  #error = el("div");
  #before = el("div");
  #loadedAt = 0;
  #newest = 0;
  #drawings = 0;
  #requests = 0;
  #shown = "";

  constructor({ title, client, by, paths }) {
    const { params } = place();
    this.paths = paths;
    this.settings = settingsIn(Object.keys(params).length ? params : remembered.get(paths.overview) ?? {}, by,
      usualRange(client === account && account.session.account.created_at));
    this.range = rangeControl(this.settings, (range) => this.#change(range));
    this.client = client;
    this.by = by;
    this.flushSeconds = 5;
    this.csv = el("a.button.small", { download: "usage.csv" }, "Export CSV");
    this.figures = el("div", null, this.#tiles, this.#chips, el("div.grid", null, Object.values(this.#charts).map(({ node }) => node)),
      this.#breakdown());
    this.node = el("div", null,
      heading(title, { actions: [this.range.node, client === account && this.csv] }),
      this.#error, this.#before, this.figures);
  }

  #chart(title, formatted, isWhole) {
    return new Chart(title, { format: formatted, isWhole, syncKey: "usage", onSelect: (from, to) => {
      const range = rangeBetween(from, to);
      this.range.show(range);
      this.#change(range);
    } });
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
    const params = paramsOf(this.settings);
    remembered.set(this.paths.overview, params);
    setParams(params);
    this.load().catch((failure) => this.fail(failure));
  }

  get #isNew() {
    return this.#before.childElementCount > 0;
  }

  /* Loads if it is time to, and returns the seconds until the next look. The range may change meanwhile. */
  async refresh() {
    const isQuick = this.settings.range === "live" || this.#isNew;
    if (isQuick || Date.now() - this.#loadedAt > SLOW_REFRESH_S * 1000) await this.load();
    return this.flushSeconds;
  }

  fail(failure) {
    setChildren(this.#error, note(failure.message));
  }

  async load() {
    const number = ++this.#newest;
    const { filters, by, all, split } = this.settings;
    const span = spanOf(this.settings);
    const grouped = (top) => this.client.get(`/usage${query({ ...span, ...filters, step: stepOf(this.settings), by, top })}`);
    const top = all && !split ? ALL : SHOWN;
    const [groups, whole] = await Promise.all([grouped(top), all && split ? grouped(ALL) : null]);
    if (number !== this.#newest) return;
    markRest(groups, top);
    if (whole) markRest(whole, ALL);
    this.#loadedAt = Date.now();
    this.flushSeconds = Math.max(groups.flush_s, LEAST_REFRESH_S);
    this.#requests = groups.totals.requests;
    this.csv.setAttribute("href", `/v1/account/usage/csv${query({ ...span, ...filters, step: groups.step })}`);
    setChildren(this.#error);
    this.#show(groups, whole ?? groups);
  }

  /* Draws the figures, if they have changed: charts and the table in tasks of their own, so that the totals are on the screen before. */
  #show(groups, listed) {
    const { from: _from, to: _to, ...figures } = groups;
    const shown = JSON.stringify([this.settings, figures, listed.series.length, groups.today && format.ago(groups.today.resets_at)]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.#hideUntilUsed();
    this.#showTiles(groups.totals, groups.today);
    this.#showChips(groups);
    this.#inTurn([() => this.#showCharts(groups), () => this.#showTable(listed)]);
  }

  /* Each part in a task of its own, unless newer figures are drawn meanwhile. */
  async #inTurn(parts) {
    const drawing = ++this.#drawings;
    for (const part of parts) {
      await nextTask();
      if (drawing !== this.#drawings) return;
      part();
    }
  }

  showFirst(steps) {
    setChildren(this.#before, steps);
    this.#hideUntilUsed();
  }

  #hideUntilUsed() {
    if (this.#requests) setChildren(this.#before);
    this.figures.hidden = this.#isNew;
  }

  #showTiles(totals, today) {
    setChildren(this.#tiles, el("div.tiles", null,
      tile("Requests", format.compact(totals.requests), rangeName(this.settings)),
      tile("Errors", totals.errors ? el("a", { href: this.#errorsLink(), "aria-label": `Errors ${format.number(totals.errors)}: explain` },
        format.compact(totals.errors)) : "0", totals.requests ? format.share(totals.errors, totals.requests) : ""),
      tile("Compute units", format.compact(totals.units), totals.requests ? `${format.compact(totals.units / totals.requests)} per request` : ""),
      tile("p50 latency", format.millis(totals.p50_ms), "median"),
      tile("p99 latency", format.millis(totals.p99_ms), "99th percentile"),
      tile("Cache hit rate", format.share(totals.hits, totals.requests), `${format.compact(totals.hits)} replies`)),
    today && quotaTile(today));
  }

  #errorsLink(more = {}) {
    return linkTo(this.paths.errors, { ...rangeParams(this.settings), ...this.settings.filters, ...more });
  }

  #showChips(groups) {
    const chips = Object.entries(this.settings.filters).map(([by, value]) => button([`${this.by[by]}: ${nameOf(value, groups)}`, " ×"], () => {
      const { [by]: _, ...rest } = this.settings.filters;
      this.#change({ filters: rest });
    }, { kind: "small", class: "small chip", "aria-label": `Remove filter ${this.by[by]}: ${nameOf(value, groups)}` }));
    refreshChildren(this.#chips, chips.length > 0 && el("span.hint", null, "Filters"), chips);
    this.#chips.classList.toggle("spread", chips.length > 0);
  }

  #showCharts(groups) {
    const split = this.settings.split && groups.series.length > 0;
    const lines = (pick, sumUp) => groups.series.map((each, at) => ({
      label: labelOf(each), colour: `series-${at}`, values: pick(each), total: sumUp(each.totals), soft: true,
      onclick: each.isRest ? () => this.#showAll() : undefined }));
    const { total, totals } = groups;
    const shown = split ? {
      requests: lines((each) => each.requests, (sum) => format.compact(sum.requests)),
      units: lines((each) => each.units, (sum) => format.compact(sum.units)),
      latency: lines((each) => each.p99_ms, (sum) => format.millis(sum.p99_ms)),
      hits: lines((each) => ratio(each.hits, each.requests), (sum) => format.share(sum.hits, sum.requests)),
    } : {
      requests: [
        { label: "requests", colour: "series-0", values: total.requests, bars: true, total: format.compact(totals.requests) },
        { label: "errors", colour: "series-4", values: total.errors, bars: true, total: format.compact(totals.errors) },
      ],
      units: [{ label: "units", colour: "series-2", values: total.units, bars: true, total: format.compact(totals.units) }],
      latency: [
        { label: "p50", colour: "series-0", values: total.p50_ms, total: format.millis(totals.p50_ms) },
        { label: "p99", colour: "series-1", values: total.p99_ms, soft: true, total: format.millis(totals.p99_ms) },
      ],
      hits: [{ label: "of all replies", colour: "series-6", values: ratio(total.hits, total.requests), total: format.share(totals.hits, totals.requests) }],
    };
    const per = `per ${groups.step}`;
    const units = { requests: per, units: per, latency: split ? "p99" : "", hits: `of requests ${per}` };
    for (const [name, series] of Object.entries(shown)) {
      this.#charts[name].draw(groups.times, series, { unit: units[name], step: STEPS[groups.step] });
    }
  }

  #showTable(groups) {
    const { by, split } = this.settings;
    if (!groups.series.length) {
      setChildren(this.#table, empty("No requests in this period", "Requests appear here within a few seconds.",
        el("a.button", { href: "#/explorer" }, "Open the explorer")));
      return;
    }
    const most = Math.max(...groups.series.map(({ totals }) => totals.requests), 1);
    const colour = (each) => split && groups.series.indexOf(each) <= SHOWN && swatch(`var(--series-${groups.series.indexOf(each)})`);
    refreshChildren(this.#table, table(`Usage by ${this.by[by].toLowerCase()}`, [
      { name: this.by[by], show: (each) => [colour(each), this.#filterButton(each)] },
      { name: "Requests", kind: "num", show: ({ totals }) => el("div", null, format.number(totals.requests), bar(totals.requests / most)) },
      { name: "Error rate", kind: "num", show: (each) => this.#errorRate(each) },
      { name: "Units", kind: "num", show: ({ totals }) => format.compact(totals.units) },
      { name: "p50", kind: "num", show: ({ totals }) => format.millis(totals.p50_ms) },
      { name: "p99", kind: "num", show: ({ totals }) => format.millis(totals.p99_ms) },
      { name: "Cache hit rate", kind: "num", show: ({ totals }) => format.share(totals.hits, totals.requests) },
    ], groups.series));
  }

  #showAll() {
    this.#change({ all: true });
    this.#table.scrollIntoView({ block: "center" });
  }

  #errorRate({ name, totals, isRest }) {
    const rate = format.share(totals.errors, totals.requests);
    const isLinked = totals.errors > 0 && !isRest && name !== NO_NETWORK && name !== "";
    return isLinked ? el("a", { href: this.#errorsLink({ [this.settings.by]: name }) }, rate) : rate;
  }

  /* A group's name, which filters the whole view when clicked. */
  #filterButton(each) {
    if (each.isRest) return button(labelOf(each), () => this.#showAll(), { kind: "link", title: "Show all" });
    if (each.name === "") return labelOf(each);
    return button(labelOf(each), () => {
      labels.set(each.name, labelOf(each));
      this.#change({ filters: { ...this.settings.filters, [this.settings.by]: each.name } });
    }, { kind: "link", title: "Filter by this" });
  }
}

const labels = new Map();
// The API's name for requests that belong to no network.
const NO_NETWORK = "-";
// Its name for methods that it does not know.
const UNKNOWN = "other";
const NAMES = { [NO_NETWORK]: "No network", [UNKNOWN]: "Unknown methods" };
const labelOf = ({ name, label, isRest }) => (isRest ? "other" : NAMES[name] ?? (label || name || "None"));

/* After this many groups the last one is the sum of all others. */
function markRest({ series }, top) {
  if (series.length > top) series.at(-1).isRest = true;
}

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
