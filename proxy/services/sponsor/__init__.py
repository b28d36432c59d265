"""Sponsoring operations, one service in several rooms: `policies` are what owners set, the `market` says what things cost,
`paymasters` sign, `sponsoring` decides and reserves, `settling` closes what the chain has decided."""
