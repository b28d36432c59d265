"""Following networks, one service in several rooms: `reader` asks the chain, `sinks` says what is made of the answers,
`following` keeps one network's record true, `backfill` adds what lies before it."""
