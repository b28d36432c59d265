-- Why a follower makes no progress although it goes on trying.

alter table followed_networks add column if not exists stuck text;
