"""State that all hosts share in Valkey or Redis: leases of limits, counts, live hosts, cached results.

Limits use our own client (`valkey_link`), for which no call waits long. Cached data goes through aiocache (`cache`).
"""
