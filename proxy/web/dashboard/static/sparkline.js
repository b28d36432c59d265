/* A row of small bars, one per value: the recent past at a glance. */

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, GAP, HEIGHT] = [3, 1, 22];
// The share of the height that the smallest bar has.
const LEAST = 0.18;

function node(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/* `bars`: [{value, tone}…], the newest last; `label` describes them for screen readers. */
export function sparkline(bars, label) {
  const most = Math.max(1, ...bars.map(({ value }) => value));
  const svg = node("svg", { class: "sparkline", role: "img", "aria-label": label, width: bars.length * (WIDTH + GAP), height: HEIGHT });
  bars.forEach(({ value, tone }, at) => {
    const height = Math.round(HEIGHT * Math.max(LEAST, value / most));
    svg.append(node("rect", { class: tone, x: at * (WIDTH + GAP), y: HEIGHT - height, width: WIDTH, height, rx: 1 }));
  });
  return svg;
}
