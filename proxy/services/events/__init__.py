"""Events for webhooks, one service in several rooms: `watch` has a network's webhooks in memory, `sink` writes the events of
its blocks, `composing` finds out what they lack, `finality` when they may be told, `tracing` and `mempool` see what no block
tells, `composition` is what all of them make bodies with."""
