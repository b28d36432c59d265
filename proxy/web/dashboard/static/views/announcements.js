/* Announcements: notices that every dashboard shows, for operators. */

import { admin } from "../api.js";
import { el } from "../dom.js";
import * as forms from "../forms.js";
import { asyncRegion, badge, button, card, confirm, dialog, empty, heading, table, toast } from "../components.js";
import * as format from "../format.js";

const LEVELS = { info: "Info", warning: "Warning", critical: "Critical" };
const TONES = { info: "off", warning: "wait", critical: "bad" };
const DAY = 86400e3;

/* The value of a datetime-local field in the browser's time zone. */
const localTime = (moment) => new Date(moment - new Date().getTimezoneOffset() * 60e3).toISOString().slice(0, 16);

export async function showForOperators() {
  const list = asyncRegion(async () => {
    const { announcements } = await admin.get("/announcements");
    return announcements.length ? announcementTable(announcements, list) : empty("No announcements", "Every dashboard shows an announcement until it ends or is dismissed.");
  });
  await list.ready;
  return el("div", null, heading("Announcements", { lead: "Short notices for everyone who is signed in.",
    actions: button("Announce", () => announce(list), { kind: "main" }) }), card(null, list.node));
}

function announcementTable(announcements, list) {
  return table("Announcements", [
    { name: "Notice", show: (each) => each.text },
    { name: "Level", show: (each) => badge(each.level, TONES[each.level]) },
    { name: "From", show: (each) => format.time(each.from) },
    { name: "Until", show: (each) => format.time(each.until) },
    { name: "By", show: (each) => each.by },
    { name: "Actions", kind: "row-actions", show: (each) => button("Delete", () => remove(each, list), { kind: "small", "aria-label": `Delete ${each.text}` }) },
  ], announcements);
}

function remove(each, list) {
  confirm("Delete announcement", "It disappears from every dashboard within a minute.", "Delete announcement", async () => {
    await admin.remove(`/announcements/${each.id}`);
    await list.reload();
  });
}

function announce(list) {
  dialog("Announce", (close) => {
    const text = forms.lines("Notice", { required: true, maxlength: "500", rows: 3 });
    const level = forms.select("Level", LEVELS);
    const from = forms.text("From", { type: "datetime-local", hint: "Leave empty for now." });
    const until = forms.text("Until", { type: "datetime-local", required: true, value: localTime(Date.now() + DAY) });
    return forms.form([text.node, forms.row(level.node, from.node, until.node)], {
      label: "Announce",
      labels: { text: "Notice" },
      cancel: close,
      send: async () => {
        await admin.post("/announcements", { level: level.read(), text: text.read(), until: new Date(until.read()).toISOString(),
          ...(from.read() && { from: new Date(from.read()).toISOString() }) });
        close();
        toast("Announcement saved");
        await list.reload();
      },
    });
  });
}
