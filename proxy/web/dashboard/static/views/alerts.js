/* Alerts: which ones the account gets, where they are sent, and the last ones. */

import { account } from "../api.js";
import { el, setChildren } from "../dom.js";
import * as forms from "../forms.js";
import { asyncButton, badge, button, card, empty, heading, note, secretDialog, secretField, table, toast } from "../components.js";
import * as format from "../format.js";
import { linkTo } from "../location.js";

const KINDS = {
  day_usage: "Requests of the day: at 50, 75, 90 and 100%",
  error_rate: "Error rate: too many failed requests",
  webhook_paused: "Webhooks that are paused or disabled",
  policy_budget: "Budgets of gas policies: at 50, 75, 90 and 100%",
};
const PAGES = { day_usage: "overview", error_rate: "errors", webhook_paused: "webhooks", policy_budget: "policies" };

const FORMATS = {
  json: ["JSON", "A signed event, like other webhook deliveries."],
  slack: ["Slack", "A message for an incoming webhook of Slack, or of a service that takes the same, such as Mattermost."],
  pagerduty: ["PagerDuty", "Triggers an incident through the Events API v2."],
};
const LABELS = { alerts: "Send alerts about", error_rate_percent: "Error rate from (%)", webhook_url: "Webhook URL", webhook_format: "Format", routing_key: "PagerDuty integration key" };
const PLACEHOLDERS = { json: "https://hooks.example.com/alerts", slack: "The URL of the incoming webhook", pagerduty: "PagerDuty's own" };

export async function show() {
  const node = el("div");
  const recent = el("div");
  const showRecent = (found) => setChildren(recent, recentTable(found.recent));
  const draw = (found) => setChildren(node, heading("Alerts", {
    lead: "Each threshold is reported once per day, or once per period of a budget.",
    actions: account.can("manage") && asyncButton("Send a test alert", async () => {
      const sent = await account.post("/alerts/test");
      toast(`Test alert sent ${[sent.mail && "by mail", sent.webhook && "to your webhook"].filter(Boolean).join(" and ")}`);
      showRecent(await account.get("/alerts"));
    }),
  }), account.can("manage") && settingsCard(found, draw), card("Recent alerts", recent));
  const found = await account.get("/alerts");
  showRecent(found);
  draw(found);
  return node;
}

function settingsCard(found, redraw) {
  const kinds = forms.checks("Send alerts about", KINDS, found.alerts);
  const rate = forms.count("Error rate from (%)", { min: "1", max: "100", required: true, value: String(found.error_rate_percent),
    hint: "Of at least 20 requests within 15 minutes." });
  const mail = forms.checks("Mail", { mail: `Send to ${found.mail_address}` }, found.mail ? ["mail"] : []);
  const before = found.webhook?.format ?? "json";
  const chosen = forms.choice("Format", FORMATS, before, showFormat);
  const url = forms.text("Webhook URL", { type: "url", value: found.webhook?.url ?? "", hint: "Leave empty for none." });
  const routingKey = forms.password("PagerDuty integration key", { autocomplete: "off", maxlength: "64",
    hint: before === "pagerduty" ? "Stored. Fill in to replace it." : "Of an integration “Events API v2” of a PagerDuty service." });
  function showFormat(format) {
    url.control.placeholder = PLACEHOLDERS[format];
    routingKey.node.hidden = format !== "pagerduty";
  }
  showFormat(before);
  const isStopped = found.webhook && found.webhook.status !== "active";
  return card(null, isStopped && note(`The webhook for alerts is ${found.webhook.status}, because its endpoint did not accept them. Save to resume it.`, "wait"),
    forms.form([kinds.node, rate.node, found.mail_available && mail.node, chosen.node, forms.row(url.node, routingKey.node)], {
      label: "Save",
      labels: LABELS,
      send: async () => {
        const wanted = url.read() || null;
        const format = chosen.read();
        const changed = await account.patch("/alerts", { alerts: kinds.read(), error_rate_percent: rate.read(),
          ...(found.mail_available && { mail: mail.read().length > 0 }),
          ...((wanted !== (found.webhook?.url ?? null) || isStopped) && (wanted || format !== "pagerduty" || before === format) && { webhook_url: wanted }),
          ...(format !== before && { webhook_format: format }), ...(format === "pagerduty" && routingKey.read() && { routing_key: routingKey.read() }) });
        toast("Alerts saved");
        redraw(changed);
        if (changed.signing_secret) showSecret(changed.signing_secret);
      },
    }));
}

function showSecret(secret) {
  secretDialog("Signing secret", (close) => [el("p", null, "Copy this secret now. You cannot see it again."),
    secretField(secret, "Signing secret"), el("div.actions", null, button("Done", close, { kind: "main" }))]);
}

const pathOf = ({ alert, subject }) => [PAGES[alert], subject].filter(Boolean).map(encodeURIComponent).join("/");

function recentTable(recent) {
  if (!recent.length) return empty("No alerts yet", "Send a test alert to see where alerts arrive.");
  return table("Recent alerts", [
    { name: "Alert", show: (each) => (PAGES[each.alert] ? el("a", { href: linkTo(pathOf(each)) }, each.message) : each.message) },
    { name: "Time", show: (each) => format.time(each.raised_at) },
    { name: "Webhook delivery", show: (each) => (each.delivery ? badge(each.delivery) : format.NONE) },
  ], recent);
}
