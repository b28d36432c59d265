-- position
-- How far the write-ahead log of this server goes: written by a primary, replayed by a standby.
select (case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end - '0/0'::pg_lsn)::bigint;
