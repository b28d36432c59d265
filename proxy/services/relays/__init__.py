"""Private transactions: `private_sender` sends them to relays, `private_lookup` finds them there, and `public_fallback`
sends those to the public mempool whose senders asked for it."""
