/* JSON syntax highlighting. Builds text nodes only, because chain data is untrusted. */

import { el } from "../dom.js";

// In the output of JSON.stringify with an indent, a literal outside a string always follows white space.
const TOKEN = /("(?:\\.|[^"\\])*")(?=(\s*:)?)|(?<=^|\s)(-?\d[\d.eE+-]*|true|false|null)(?=[,\s]|$)/g;

export function highlighted(text) {
  const source = pretty(text);
  const parts = [];
  let end = 0;
  for (const match of source.matchAll(TOKEN)) {
    parts.push(source.slice(end, match.index), el(match[3] ? "span.j-literal" : match[2] ? "span.j-key" : "span.j-text", null, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, source.slice(end)];
}

/* Indents JSON, unless parsing would change an integer too large for JavaScript. */
function pretty(text) {
  try {
    const value = JSON.parse(text);
    return /[\[:,\s]-?\d{16,}/.test(text) ? text : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}
