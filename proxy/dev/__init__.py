"""`python -m proxy dev`: the whole service on one machine, with an embedded Postgres and a development chain."""
