"""State in Postgres: one module per kind of row, with its queries in `schemas/sql/queries`.

`pool` has a process's connections, `migrate` applies the schema, and `sql` loads the queries.
"""
