-- Validate which networks the tables from before have. This reads them, which can take minutes, and blocks no reads or writes.
set local statement_timeout = 0;

do $$
declare
    name text;
begin
    foreach name in array array['token_holdings_before', 'nft_holdings_before'] loop
        if to_regclass(name) is not null then
            execute format('alter table %I validate constraint networks_before', name);
        end if;
    end loop;
end $$;
