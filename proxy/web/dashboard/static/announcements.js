/* The operators' current announcements, above every view until they are dismissed. */

import { el, setChildren } from "./dom.js";
import { button, note, poll } from "./components.js";

const DISMISSED = "penstock.dismissed";
const REFRESH_S = 60;
const TONES = { info: "info", warning: "wait", critical: "bad" };

function dismissed() {
  try {
    return JSON.parse(localStorage.getItem(DISMISSED)) ?? [];
  } catch {
    return [];
  }
}

function dismiss(id, current) {
  try {
    // Only current ones are kept, so the list stays short.
    localStorage.setItem(DISMISSED, JSON.stringify([...dismissed().filter((each) => current.includes(each)), id]));
  } catch {
    // Storage may be blocked; the announcement returns with the next page.
  }
}

export function announcementBar(client) {
  const node = el("aside.announcements", { "aria-label": "Announcements" });
  const show = (announcements) => {
    const hidden = dismissed();
    const now = Date.now();
    const ids = announcements.map(({ id }) => id);
    setChildren(node, announcements.filter((each) => !hidden.includes(each.id) && isCurrent(each, now)).map((each) => {
      const text = note(each.text, TONES[each.level]);
      text.append(button("×", () => {
        dismiss(each.id, ids);
        text.remove();
      }, { kind: "quiet", "aria-label": "Dismiss" }));
      return text;
    }));
  };
  const load = async () => show((await client.get("/announcements")).announcements);
  if (client.announcements) show(client.announcements);
  else load().catch(() => {});
  poll(node, REFRESH_S, load);
  return node;
}

/* Operators' lists have past and future ones too. */
const isCurrent = ({ from, until }, now) => (!from || Date.parse(from) <= now) && (!until || Date.parse(until) > now);
