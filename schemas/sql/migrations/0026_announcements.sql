-- Short notices by operators, shown in every dashboard.

create table announcements (
    id bigint generated always as identity primary key,
    level text not null check (level in ('info', 'warning', 'critical')),
    text text not null,
    starts_at timestamptz not null,
    ends_at timestamptz not null,
    by_whom text not null,
    created_at timestamptz not null default now()
);

create index announcements_by_end on announcements (ends_at);
