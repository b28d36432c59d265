/* What keys do: figures, charts over time, and where it goes by chain, method and key; for operators of all accounts. */

import { account, query } from "../api.js";
import { Chart } from "../chart.js";
import { bar, el, put, renew, swatch } from "../dom.js";
import { button, choice, empty, heading, note, poll, table } from "../components.js";
import * as format from "../format.js";

const RANGES = { live: "30 min", "3h": "3 h", "24h": "24 h", "7d": "7 d", "30d": "30 d", "90d": "90 d" };
const SECONDS = { live: 1800, "3h": 10800, "24h": 86400, "7d": 604800, "30d": 2592000, "90d": 7776000 };
// A longer range changes slowly, and costs more to read.
const SLOW_S = 15;

const rate = (hits, requests) => hits.map((hit, at) => (requests[at] ? hit / requests[at] : null));
const within = (range) => {
  const to = Math.floor(Date.now() / 1000);
  const iso = (seconds) => new Date(seconds * 1000).toISOString();
  return { from: iso(to - SECONDS[range]), to: iso(to) };
};

export const show = () => Usage.open({ title: "Overview", side: account, by: { network: "Chain", method: "Method", key: "Key" } });

// What is looked at is kept while the page is open, so that coming back finds it as it was.
const kept = new Map();

export class Usage {
  static async open(of) {
    const view = new Usage(of);
    await view.load().catch((failure) => view.fail(failure));
    poll(view.node, 2, () => view.turn());
    return view.node;
  }

  #charts = {
    requests: new Chart("Requests", { show: format.compact, together: "usage" }),
    units: new Chart("Compute units", { show: format.compact, together: "usage" }),
    latency: new Chart("Latency", { show: format.millis, together: "usage" }),
    hits: new Chart("Cache hits", { show: format.percent, together: "usage" }),
  };
  #tiles = el("div");
  #chips = el("div.filter");
  #where = el("div");
  #problem = el("div");
  #flush = 5;
  #newest = 0;

  constructor({ title, side, by }) {
    if (!kept.has(title)) kept.set(title, { range: "24h", by: Object.keys(by)[0], split: false, only: {} });
    this.wanted = kept.get(title);
    this.side = side;
    this.by = by;
    this.csv = el("a.button.small", { download: "usage.csv" }, "Export CSV");
    this.node = el("div", null,
      heading(title, { actions: [choice("Range", RANGES, this.wanted.range, (range) => this.#want({ range })), side === account && this.csv] }),
      this.#problem, this.#tiles, this.#chips, el("div.grid", null, Object.values(this.#charts).map(({ node }) => node)),
      this.#breakdown());
  }

  #breakdown() {
    const split = el("input", { type: "checkbox", id: "split", onchange: () => this.#want({ split: split.checked }) });
    split.checked = this.wanted.split;
    return el("section.card", { "aria-label": "Where it goes" },
      el("div.spread", null, el("h2", null, "Where it goes"),
        el("div.filter", null, el("span.check", null, split, el("label", { for: "split" }, "Draw each in the charts")),
          choice("By", this.by, this.wanted.by, (by) => this.#want({ by })))),
      this.#where);
  }

  #want(change) {
    Object.assign(this.wanted, change);
    this.load().catch((failure) => this.fail(failure));
  }

  /* The next look: soon for the last half hour, later for the rest. */
  async turn() {
    await this.load();
    return this.wanted.range === "live" ? this.#flush : Math.max(SLOW_S, this.#flush);
  }

  fail(failure) {
    put(this.#problem, note(failure.message));
  }

  async load() {
    const number = ++this.#newest;
    const span = within(this.wanted.range);
    const asked = { ...span, ...this.wanted.only, step: this.wanted.range === "live" || this.wanted.range === "3h" ? "minute" : "auto" };
    const [live, whole, parts] = await Promise.all([
      this.side.get("/live"),
      this.side.get(`/usage${query({ ...asked, by: "total" })}`),
      this.side.get(`/usage${query({ ...asked, by: this.wanted.by, top: 8 })}`),
    ]);
    if (number !== this.#newest) return;
    this.#flush = live.flush_s || this.#flush;
    this.csv.setAttribute("href", `/v1/account/usage/csv${query({ ...span, ...this.wanted.only, step: whole.step })}`);
    put(this.#problem);
    this.#showTiles(whole.totals, live.today);
    this.#showChips(parts);
    this.#showCharts(whole, parts);
    this.#showWhere(parts);
  }

  #showTiles(totals, today) {
    const tile = (name, figure, below) => el("div.tile", null,
      el("span.name", null, name), el("span.figure", null, figure), el("span.below", null, below));
    put(this.#tiles, el("div.tiles", null,
      tile("Requests", format.compact(totals.requests), `in ${RANGES[this.wanted.range]}`),
      tile("Errors", format.compact(totals.errors), totals.requests ? format.share(totals.errors, totals.requests) : ""),
      tile("Compute units", format.compact(totals.units), totals.requests ? `${format.compact(totals.units / totals.requests)} a request` : ""),
      tile("p50", format.millis(totals.p50_ms), "half are faster"),
      tile("p99", format.millis(totals.p99_ms), "99 of 100 are faster"),
      tile("Cache hits", format.share(totals.hits, totals.requests), `${format.compact(totals.hits)} replies`)),
    today && quota(today));
  }

  #showChips(parts) {
    const chips = Object.entries(this.wanted.only).map(([by, value]) => button([`${this.by[by]}: ${nameOf(by, value, parts)}`, " ×"], () => {
      const { [by]: _, ...rest } = this.wanted.only;
      this.#want({ only: rest });
    }, { kind: "small", class: "small chip", "aria-label": `Show all again, not only ${value}` }));
    renew(this.#chips, chips.length > 0 && el("span.hint", null, "Only"), chips);
    this.#chips.classList.toggle("spread", chips.length > 0);
  }

  #showCharts(whole, parts) {
    const split = this.wanted.split && parts.series.length > 0;
    const lines = (pick, total) => parts.series.map((each, at) => ({
      label: labelOf(each), colour: `series-${at}`, values: pick(each), total: total(each.totals), soft: true }));
    const all = whole.series[0] ?? { requests: [], errors: [], units: [], hits: [], p50_ms: [], p99_ms: [] };
    const { totals } = whole;
    const shown = split ? {
      requests: lines((each) => each.requests, (sum) => format.compact(sum.requests)),
      units: lines((each) => each.units, (sum) => format.compact(sum.units)),
      latency: lines((each) => each.p99_ms, (sum) => format.millis(sum.p99_ms)),
      hits: lines((each) => rate(each.hits, each.requests), (sum) => format.share(sum.hits, sum.requests)),
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
      hits: [{ label: "of all replies", colour: "series-6", values: rate(all.hits, all.requests), total: format.share(totals.hits, totals.requests) }],
    };
    for (const [name, series] of Object.entries(shown)) this.#charts[name].draw(split ? parts.times : whole.times, series);
  }

  #showWhere(parts) {
    if (!parts.series.length) {
      put(this.#where, empty("Nothing in this time", "Requests appear here a few seconds after they are answered.",
        el("a.button", { href: "#/explorer" }, "Try one in the explorer")));
      return;
    }
    const most = Math.max(...parts.series.map(({ totals }) => totals.requests), 1);
    const colour = (each) => this.wanted.split && swatch(`var(--series-${parts.series.indexOf(each)})`);
    renew(this.#where, table(`Usage by ${this.by[this.wanted.by].toLowerCase()}`, [
      { name: this.by[this.wanted.by], show: (each) => [colour(each), this.#only(each)] },
      { name: "Requests", kind: "num", show: ({ totals }) => el("div", null, format.number(totals.requests), bar(totals.requests / most)) },
      { name: "Errors", kind: "num", show: ({ totals }) => format.share(totals.errors, totals.requests) },
      { name: "Units", kind: "num", show: ({ totals }) => format.compact(totals.units) },
      { name: "p50", kind: "num", show: ({ totals }) => format.millis(totals.p50_ms) },
      { name: "p99", kind: "num", show: ({ totals }) => format.millis(totals.p99_ms) },
      { name: "Cache hits", kind: "num", show: ({ totals }) => format.share(totals.hits, totals.requests) },
    ], parts.series));
  }

  /* A name that narrows everything down to itself when it is pressed. */
  #only(each) {
    if (each.name === "other" || each.name === "") return labelOf(each);
    return button(labelOf(each), () => {
      names.set(each.name, labelOf(each));
      this.#want({ only: { ...this.wanted.only, [this.wanted.by]: each.name } });
    }, { kind: "link", title: "Show only this" });
  }
}

const names = new Map();
// What requests that are of no chain are counted under.
const NO_NETWORK = "-";
const labelOf = ({ name, label }) => (name === NO_NETWORK ? "without a chain" : label || name || "none");
const nameOf = (by, value, parts) => names.get(value) ?? parts.series.find(({ name }) => name === value)?.label ?? value;

function quota(today) {
  const limit = today.left === null ? null : today.used + today.left;
  const used = limit ? today.used / limit : 0;
  return el("div.tile.strip", { id: "quota" }, el("span.name", null, "Left today"),
    el("span.figure", null, limit === null ? "No daily limit" : format.number(today.left)),
    limit !== null && bar(used, used > 0.9 ? "bad" : used > 0.7 ? "wait" : ""),
    el("span.below", null, limit === null ? `${format.number(today.used)} used today`
      : `${format.number(today.used)} of ${format.number(limit)} used, starts anew ${format.ago(today.resets_at)}`));
}
