/*
 * Time series charts in the colours of the current theme: a title with the unit, a legend with the totals, and the plot. The values
 * under the pointer are shown in a tooltip, or in a long legend. Dragging over the plot selects a range.
 */

import "./language.js"; // before uPlot
import { el, nextTask, setChildren, swatch } from "./dom.js";
import * as format from "./format.js";

// Fetched beside the data of the view, and run when the first chart is near the screen: the view's figures come before it.
const LIBRARY = "./vendor/uplot/uPlot.min.js";
document.head.append(el("link", { rel: "modulepreload", href: new URL(LIBRARY, import.meta.url).pathname }));
let uPlot = null;

const HEIGHT = 336;
const FONT = '12px -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif';
// More series than this have their legend beside the plot.
const LEGEND_ABOVE = 2;
// Pixels between the pointer and the tooltip.
const TIP_GAP = 14;
// Room above the highest value, so that its label does not touch the legend.
const HEADROOM = 1.08;
// Half the width of the last label of the time axis.
const RIGHT_PADDING = 24;
// Charts this close to the screen are drawn. The others wait until the page is scrolled.
const NEAR = "200px";
const drawn = new Set();
const colours = new Map();

/* Resolves a CSS colour variable for the canvas. light-dark() resolves only on an element, hence the probe. */
function colourOf(name) {
  if (!colours.has(name)) {
    const probe = el("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

/* Redraws all charts, after a theme change. */
export function redraw() {
  colours.clear();
  for (const chart of drawn) chart.rebuild();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

export class Chart {
  #plot = null;
  #shape = "";
  #data = [];
  #series = [];
  #width = 0;
  #isNear = false;
  #isStale = false;
  #step = 3600;
  #span = null;
  #unit = el("span.hint");

  /*
   * `format` turns a value into text. `isWhole`: there is nothing between whole numbers. Charts with the same `syncKey` share the
   * pointer. `onSelect` gets two Unix times.
   */
  constructor(title, { format, isWhole = false, syncKey, onSelect = null }) {
    this.format = format;
    this.isWhole = isWhole;
    this.syncKey = syncKey;
    this.onSelect = onSelect;
    this.legend = el("div.legend");
    this.tip = el("div.tip", { hidden: true, "aria-hidden": "true" });
    this.canvas = el("div.plot", { role: "img", "aria-label": title });
    this.title = title;
    this.node = el("figure.chart", null, el("figcaption", null, el("h2", null, title), this.#unit),
      this.legend, el("div.stage", null, this.canvas, this.tip));
    this.observer = new ResizeObserver(([entry]) => this.#fit(entry.contentRect.width));
    this.observer.observe(this.canvas);
    this.sight = new IntersectionObserver((entries) => this.#see(entries.at(-1).isIntersecting), { rootMargin: NEAR });
    this.sight.observe(this.canvas);
  }

  /* The library runs and each chart is drawn in a task of its own, so that none blocks the page for long. */
  async #see(isNear) {
    this.#isNear = isNear;
    if (!isNear) return;
    await nextTask();
    uPlot ??= (await import(LIBRARY)).default;
    await nextTask();
    this.#update();
  }

  /*
   * `times` are Unix seconds, `step` the seconds between them, `span` the ends of the axis if they are not those of the times. A
   * series is {label, colour, values, bars, soft, total, onclick}; `colour` names a CSS variable, and `onclick` makes its label in
   * the legend a button.
   */
  draw(times, series, { unit = "", step = times[1] - times[0] || 3600, span = null } = {}) {
    this.#data = [times, ...series.map(({ values }) => values)];
    this.#series = series;
    this.#step = step;
    this.#span = span;
    setChildren(this.#unit, unit);
    this.canvas.setAttribute("aria-label", `${this.title}: ${series.map(({ label, total }) => `${label} ${total}`).join(", ")}`);
    this.node.classList.toggle("beside", series.length > LEGEND_ABOVE);
    this.#showLegend();
    this.#isStale = true;
    this.#update();
  }

  /* Plots what has changed, unless the chart is far off the screen. */
  #update() {
    if (!uPlot || !this.#isStale || !this.#isNear || !this.#width || !this.#data.length) return;
    const shape = JSON.stringify(this.#series.map(({ label, colour, bars }) => [label, colour, bars]));
    if (this.#plot && shape === this.#shape) this.#plot.setData(this.#data);
    else this.#build();
    this.#shape = shape;
    this.#isStale = false;
    this.#showPointer();
  }

  /* The first and last Unix time of the axis: half a step beyond the data, so that the first and last bars are whole. */
  get span() {
    const [times] = this.#data;
    const [first, last] = this.#span ?? [times[0], times.at(-1)];
    return [Math.min(first, times[0]) - this.#step / 2, Math.max(last, times.at(-1)) + this.#step / 2];
  }

  rebuild() {
    this.#shape = "";
    this.#isStale = true;
    this.#update();
  }

  #build() {
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(), this.#data, this.canvas);
    drawn.add(this);
    for (const chart of drawn) if (!chart.canvas.isConnected) chart.destroy();
  }

  destroy() {
    this.observer.disconnect();
    this.sight.disconnect();
    this.#plot?.destroy();
    drawn.delete(this);
  }

  #fit(width) {
    this.#width = Math.floor(width);
    if (this.#plot) this.#plot.setSize({ width: this.#width, height: HEIGHT });
    else this.#update();
  }

  #options() {
    const [text, grid] = [colourOf("muted"), colourOf("grid")];
    const axis = { stroke: text, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      width: this.#width,
      height: HEIGHT,
      padding: [8, RIGHT_PADDING, 0, 0],
      legend: { show: false },
      // A drag selects in one chart only; the others follow the pointer.
      cursor: { sync: { key: this.syncKey, filters: { pub: isMovement } }, y: false, points: { size: 7 },
        drag: { x: this.onSelect !== null, y: false, setScale: false } },
      // Given a single point, uPlot itself would extend the axis by a thousand days.
      scales: { x: { range: () => (this.#data[0].length ? this.span : [0, 1]) },
        y: { range: (_plot, _low, high) => [0, (high > 0 ? high : 1) * HEADROOM] } },
      axes: [
        { ...axis, grid: { show: false }, space: 64, values: TIME_AXIS, incrs: INCREMENTS.filter((each) => each >= Math.min(this.#step, 86400)) },
        { ...axis, size: 52, space: 36, ...(this.isWhole && { incrs: WHOLE }), values: (_plot, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
      series: [{}, ...this.#series.map((each) => seriesOptions(each))],
      hooks: { setCursor: [() => this.#showPointer()], setSelect: [(plot) => this.#select(plot)] },
    };
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")].map(Math.round);
    this.onSelect(from, Math.max(to, from + 60));
  }

  /* `at`: the index of the time whose values are shown; without one, the totals. */
  #showLegend(at) {
    setChildren(this.legend, this.#series.map(({ label, colour, values, total, onclick }) => el("span.item", { title: label },
      swatch(`var(--${colour})`), onclick ? el("button.link", { type: "button", onclick }, label) : el("span.label", null, label),
      el("b", null, at === undefined ? total : this.format(values[at])))));
  }

  /* Shows the time and the values under the pointer, beside it. A legend beside the plot shows them itself. */
  #showPointer() {
    const { idx, left = -1 } = this.#plot?.cursor ?? {};
    const time = this.#data[0]?.[idx];
    const isBeside = this.#series.length > LEGEND_ABOVE;
    this.tip.hidden = time === undefined || left < 0;
    if (isBeside) this.#showLegend(this.tip.hidden ? undefined : idx);
    if (this.tip.hidden) return;
    setChildren(this.tip, el("time", null, format.time(new Date(time * 1000).toISOString())),
      !isBeside && this.#series.map(({ label, colour, values }) =>
        el("span.item", null, swatch(`var(--${colour})`), el("span.label", null, label), el("b", null, this.format(values[idx])))));
    const place = this.#plot.over.offsetLeft + left;
    const isRight = place > this.#width / 2;
    this.tip.style.insetInlineStart = isRight ? "" : `${place + TIP_GAP}px`;
    this.tip.style.insetInlineEnd = isRight ? `${this.#width - place + TIP_GAP}px` : "";
  }
}

const isMovement = (type) => type === "mousemove" || type === "mouseleave";

// Distances between the ticks of whole numbers.
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].flatMap((each) => [each, 2 * each, 5 * each]);

// Seconds between ticks that read well.
const INCREMENTS = [60, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 2 * 86400, 7 * 86400, 14 * 86400, 28 * 86400, 91 * 86400, 365 * 86400];

// uPlot's axis rules, coarsest first: seconds between ticks, the label, and the text added where a day or a year begins.
const TIME_AXIS = [
  [86400 * 28, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
  [86400, "{D} {MMM}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{D} {MMM}", null, "\n{D} {MMM}", null, null, null, 1],
];

/* The values with a gap on both sides. No line reaches them, so they are drawn as points. */
function isolatedPoints(plot, series) {
  const values = plot.data[series];
  const found = [];
  for (let at = 0; at < values.length; at += 1) {
    if (values[at] !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null) found.push(at);
  }
  return found;
}

function seriesOptions({ label, colour, bars, soft }) {
  const stroke = colourOf(colour);
  const fill = stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.1)");
  if (bars) return { label, stroke, width: 0, fill: stroke, paths: uPlot.paths.bars({ size: [0.72, 28], radius: 0.15 }), points: { show: false } };
  return { label, stroke, width: 1.75, fill: soft ? undefined : fill, spanGaps: false, points: { size: 6, fill: stroke, filter: isolatedPoints } };
}
