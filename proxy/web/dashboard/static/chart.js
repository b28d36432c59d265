/* Time series charts in the colours of the current theme: a title, a legend that follows the pointer, and the plot. */

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { el, setChildren, swatch } from "./dom.js";

const HEIGHT = 168;
const FONT = '12px -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif';
// In characters. A longer legend does not fit above the plot: it floats over the plot while the pointer is there, and the table below has the colours.
const LONGEST_LEGEND = 72;
const drawn = new Set();

/* Resolves a CSS colour variable for the canvas. light-dark() resolves only on an element, hence the probe. */
function colourOf(name) {
  const probe = el("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/* Redraws all charts, after a theme change. */
export function redraw() {
  for (const chart of drawn) chart.rebuild();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

export class Chart {
  #plot = null;
  #shape = "";
  #data = [];
  #series = [];
  #width = 0;

  /* `format` turns a value into text. Charts with the same `syncKey` share the pointer. */
  constructor(title, { format, syncKey }) {
    this.format = format;
    this.syncKey = syncKey;
    this.legend = el("div.legend");
    this.time = el("time.hint");
    this.canvas = el("div.plot", { role: "img", "aria-label": title });
    this.title = title;
    this.node = el("figure.chart", null,
      el("figcaption", null, el("h2", null, title), this.time, this.legend), this.canvas);
    this.observer = new ResizeObserver(([entry]) => this.#fit(entry.contentRect.width));
    this.observer.observe(this.canvas);
  }

  /* `times` are Unix seconds. A series is {label, colour, values, bars, soft, total}; `colour` names a CSS variable. */
  draw(times, series) {
    this.#data = [times, ...series.map(({ values }) => values)];
    this.#series = series;
    this.canvas.setAttribute("aria-label", `${this.title}: ${series.map(({ label, total }) => `${label} ${total}`).join(", ")}`);
    const shape = JSON.stringify(series.map(({ label, colour, bars }) => [label, colour, bars]));
    if (this.#plot && shape === this.#shape) this.#plot.setData(this.#data);
    else this.rebuild();
    this.#shape = shape;
    this.#updateLegend(this.#plot?.cursor.idx);
  }

  rebuild() {
    this.#plot?.destroy();
    this.#plot = null;
    if (!this.#data.length || !this.#width) return;
    this.#plot = new uPlot(this.#options(), this.#data, this.canvas);
    drawn.add(this);
    for (const chart of drawn) if (!chart.canvas.isConnected) chart.destroy();
  }

  destroy() {
    this.observer.disconnect();
    this.#plot?.destroy();
    drawn.delete(this);
  }

  #fit(width) {
    this.#width = Math.floor(width);
    if (this.#plot) this.#plot.setSize({ width: this.#width, height: HEIGHT });
    else this.rebuild();
  }

  #options() {
    const [text, grid] = [colourOf("muted"), colourOf("grid")];
    const axis = { stroke: text, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      width: this.#width,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: this.syncKey }, y: false, points: { size: 7 }, drag: { setScale: false } },
      scales: { x: { range: (_plot, low, high) => this.#timeRange(low, high) }, y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.08 : 1] } },
      axes: [
        { ...axis, grid: { show: false }, space: 64, values: TIME_AXIS },
        { ...axis, size: 52, space: 36, values: (_plot, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
      series: [{}, ...this.#series.map((each) => seriesOptions(each))],
      hooks: { setCursor: [(plot) => this.#updateLegend(plot.cursor.idx)] },
    };
  }

  /* Adds half a step on both sides, so that the first and last bars are whole and stacked charts have the same axis. */
  #timeRange(low, high) {
    const [times] = this.#data;
    const step = times.length > 1 ? times[1] - times[0] : 3600;
    return [low - step / 2, high + step / 2];
  }

  /* Shows the values under the pointer, or the totals. */
  #updateLegend(at) {
    const times = this.#data[0] ?? [];
    const isAt = at !== null && at !== undefined && at < times.length;
    const length = this.#series.reduce((sum, { label, total }) => sum + label.length + total.length + 4, 0);
    this.legend.classList.toggle("floats", length > LONGEST_LEGEND);
    this.legend.hidden = length > LONGEST_LEGEND && !isAt;
    setChildren(this.time, isAt && new Date(times[at] * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" }));
    setChildren(this.legend, this.#series.map(({ label, colour, values, total }) => el("span.item", null, swatch(`var(--${colour})`), label,
      " ", el("b", null, isAt ? this.format(values[at]) : total))));
  }
}

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
