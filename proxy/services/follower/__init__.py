"""Follow networks and index their blocks.

`block_reader` fetches blocks from the upstreams, `sinks` derive data from them, `network_follower` keeps the index of one
network in step with the chain, and `backfill` adds older blocks.
"""
