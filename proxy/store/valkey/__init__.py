"""State that all hosts share in Valkey or Redis: leases of limits, counts, live hosts, cached results.

Limits use a connection of our own (`valkey_link`), which calls never wait for long. Cached data goes through aiocache
(`cache`).
"""
