"""The whole service on one machine: an embedded Postgres and a development chain beside the workers."""
