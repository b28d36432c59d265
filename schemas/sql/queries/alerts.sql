-- Alerts of accounts. The network '-' marks the webhook that an account's alerts are sent to.

-- read_settings
select a.email, s.kinds, s.error_percent, s.by_mail, w.id as webhook_id, w.url, w.status,
    w.event_type, w.reason
from accounts a
left join alert_settings s on s.account_id = a.id
left join webhooks w on w.account_id = a.id and w.network = '-' and w.status <> 'deleted'
where a.id = $1;

-- save_settings
insert into alert_settings (account_id, kinds, error_percent, by_mail) values ($1, $2, $3, $4)
on conflict (account_id) do update set
    kinds = excluded.kinds, error_percent = excluded.error_percent, by_mail = excluded.by_mail;

-- read_webhook
select number, id, account_id, network, url, event_type, config, addresses, status, reason, secret, old_secret_until,
    version, created_at, updated_at, test_key, fault
from webhooks where account_id = $1 and network = '-' and status <> 'deleted';

-- list_watched
-- A page of accounts with alerts, after the one given: the day's requests, counted and leased, and the recent ones.
select s.account_id, s.kinds, s.error_percent, s.plan, s.requests_per_day, coalesce(q.used, 0) as leased,
    coalesce(d.requests, 0) as counted, coalesce(m.requests, 0)::bigint as recent, coalesce(m.errors, 0)::bigint as failed
from (
    select alert_settings.*, plan, requests_per_day from alert_settings join accounts on accounts.id = account_id
    where account_id > $1 and not disabled order by account_id limit $2
) s
left join quota_days q on q.account_id = s.account_id and q.day = $3::date
left join usage_series u on u.account_id = s.account_id and u.key_id = '' and u.network = '' and u.method = ''
left join usage d on d.step = 'day' and d.series = u.id and d.at = $3::date::timestamp at time zone 'UTC'
left join lateral (
    select sum(requests) as requests, sum(errors) as errors from usage
    where step = 'minute' and series = u.id and at > now() - make_interval(mins => $4) and at <= now()
) m on true
order by s.account_id;

-- list_budgets
-- Policies of these accounts that have used at least half of their budget.
select p.account_id, p.id, p.name, p.reset, p.max_total, m.used
from gas_policies p cross join lateral (select gas_used(p.id, '', p.reset, $2) as used) m
where p.account_id = any($1::text[]) and p.status <> 'deleted' and p.max_total > 0 and m.used * 2 >= p.max_total;

-- raise_alerts
-- Returns the alerts that are new; none for an erased account. A changed budget or error rate raises an alert again after an hour at the earliest: the
-- first word of `period` is the same for all budgets of a period, and the threshold of an error rate is the account's setting.
insert into alerts (account_id, kind, subject, threshold, period, is_sent, about, event_id)
select $1, kind, subject, threshold, period, is_sent, about::json, event_id
from unnest($2::text[], $3::text[], $4::integer[], $5::text[], $6::boolean[], $7::text[], $8::text[])
    as given (kind, subject, threshold, period, is_sent, about, event_id)
where exists (select from accounts where id = $1 and not (disabled and email = '') for key share) and not exists (
    select from alerts a
    where a.account_id = $1 and a.kind = given.kind and a.subject = given.subject
        and (a.threshold = given.threshold or a.kind = 'error_rate')
        and split_part(a.period, ' ', 1) = split_part(given.period, ' ', 1) and a.raised_at > now() - interval '1 hour'
)
on conflict do nothing
returning kind, subject, threshold, period;

-- add_mail
insert into mails (account_id, kind, about) values ($1, 'alert', $2);

-- lock_tests
-- Serialise the test alerts of an account until the end of the transaction.
select pg_advisory_xact_lock(hashtextextended('test alerts ' || $1::text, 0));

-- count_tests
select count(*) from alerts where account_id = $1 and kind = 'test' and raised_at > now() - interval '1 hour';

-- list_recent
-- The last alerts, with the state of their deliveries.
select kind, subject, threshold, about, raised_at, d.state
from alerts left join deliveries d on d.event_id = alerts.event_id
where account_id = $1 and is_sent order by raised_at desc, id desc limit $2;

-- purge
-- Alerts of budgets without an end stay while the budget does: they must not be raised again.
delete from alerts where raised_at < now() - make_interval(days => $1) and not exists (
    select from gas_policies p
    where alerts.kind = 'policy_budget' and p.id = alerts.subject and p.status <> 'deleted'
        and alerts.period = 'always ' || trunc(p.max_total)
);
