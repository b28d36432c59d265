/* JSON, in colours, as text nodes: what chains and strangers put into it stays text. */

import { el } from "../dom.js";

// A literal outside a string always has white space before it in what JSON.stringify indents.
const TOKEN = /("(?:\\.|[^"\\])*")(?=(\s*:)?)|(?<=^|\s)(-?\d[\d.eE+-]*|true|false|null)(?=[,\s]|$)/g;

export function highlighted(text) {
  const shown = pretty(text);
  const parts = [];
  let end = 0;
  for (const match of shown.matchAll(TOKEN)) {
    parts.push(shown.slice(end, match.index), el(match[3] ? "span.j-literal" : match[2] ? "span.j-key" : "span.j-text", null, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, shown.slice(end)];
}

/* Indented, unless that would change a number that JavaScript cannot hold. */
function pretty(text) {
  try {
    const read = JSON.parse(text);
    return /[\[:,\s]-?\d{16,}/.test(text) ? text : JSON.stringify(read, null, 2);
  } catch {
    return text;
  }
}
