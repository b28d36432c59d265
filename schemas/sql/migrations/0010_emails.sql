-- An account is found by its e-mail, in any case. That no two accounts share one is seen to where they are given it: accounts
-- from before may, and must not keep a new version from starting.
create index accounts_by_email on accounts (lower(email));
