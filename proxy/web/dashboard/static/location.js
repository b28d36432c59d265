/* The current view and its settings in the URL fragment, so that they can be linked to: #/requests/req_1?status=503. */

import { query } from "./api.js";

/* {parts: ["requests", "req_1"], params: {status: "503"}}. */
export function place() {
  try {
    const [path, search] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
    return { parts: path.split("/").map(decodeURIComponent), params: Object.fromEntries(new URLSearchParams(search)) };
  } catch {
    return { parts: [""], params: {} }; // malformed percent-encoding
  }
}

export const linkTo = (path, params = {}) => `#/${path}${query(params)}`;

/* Changes the params without drawing the view again. The browser's Back undoes it. */
export function setParams(params) {
  const { parts } = place();
  const next = linkTo(parts.map(encodeURIComponent).join("/"), params);
  if (next !== location.hash) history.pushState(null, "", next);
}
