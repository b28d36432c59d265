"""Penstock: a self-hosted blockchain access API behind one metered gate."""

from proxy import compiled

__version__ = "1.0.0"

compiled.use()
