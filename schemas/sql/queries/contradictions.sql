-- add
insert into contradictions (
    at, others, network, method, kind, verified_by, upstream, operator, digest, other_digest, params, reply, other_reply, reason
)
select * from unnest(
    $1::timestamptz[], $2::jsonb[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[],
    $11::text[], $12::text[], $13::text[], $14::text[]
);

-- trim
-- Delete all but the newest rows of each network, and old ones.
delete from contradictions where id in (
    select id from (select id, row_number() over (partition by network order by at desc, id desc) as place from contradictions) rows
    where place > $1
) or at < now() - make_interval(days => $2);

-- read
select id, at, network, method, params, kind, verified_by, upstream, operator, reply, digest, others, other_reply,
    other_digest, reason
from contradictions
where ($1::text is null or network = $1) and ($2::timestamptz is null or at >= $2)
order by at desc, id desc limit $3;
