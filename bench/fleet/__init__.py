"""The whole fleet on one machine: a balancer, gateways, followers, deliverers, Valkey with Sentinel, Postgres with a standby.

`make fleet` runs it and shows a live table; `make fleet ARGS='--chaos 300'` also breaks parts at random and prints a ledger.
Every part listens on 127.0.0.1 or a private Unix socket, and dies with this program.
"""
