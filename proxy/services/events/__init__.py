"""Events for webhooks.

`watch` holds a network's webhooks in memory, `sink` writes the events of each block, `enrichment` adds data that events lack,
`finality` releases events that wait for a final block, `internal_transfers` and `mempool` find events that are not in the
logs or transactions of a block. `drafting` builds the stored events for all of them.
"""
