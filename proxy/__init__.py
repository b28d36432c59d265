"""Penstock: a self-hosted blockchain access API behind one metered gate."""

__version__ = "1.0.0"
