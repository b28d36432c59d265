-- add
insert into announcements (level, text, starts_at, ends_at, by_whom)
values ($1, $2, coalesce($3::timestamptz, now()), $4, $5)
returning id, level, text, starts_at, ends_at, by_whom, created_at;

-- list_all
-- Those that have not ended, and the last ones that have.
select id, level, text, starts_at, ends_at, by_whom, created_at
from announcements order by ends_at desc, id desc limit $1;

-- list_current
select id, level, text, starts_at, ends_at, by_whom, created_at
from announcements where starts_at <= now() and ends_at > now() order by id desc limit $1;

-- remove
delete from announcements where id = $1 returning id, level, text, starts_at, ends_at, by_whom, created_at;
