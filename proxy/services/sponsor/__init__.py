"""Sponsoring operations, one service in several rooms: `policies` are what owners set, `paymasters` sign, `sponsoring` decides
and reserves, `settling` closes what the chain has decided."""
