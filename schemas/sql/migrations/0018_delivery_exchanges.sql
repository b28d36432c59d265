-- The request and the reply of each delivery attempt, for the webhook's owner. Null for attempts of earlier versions.

alter table attempts add column sent text, add column reply_headers text, add column reply_body text;
