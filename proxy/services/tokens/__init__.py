"""Tokens and NFT collections: holders come from the index, everything else from the chain."""
