"""Tokens and collections: who holds what from the index, everything else from the chain."""
