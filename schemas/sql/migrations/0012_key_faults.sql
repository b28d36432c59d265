-- How replies to a test key are spoiled, as in X-Fault. Null means not at all.

alter table keys add column fault text;
