"""The database fixtures, for the services that cannot be told apart from their store."""

from __future__ import annotations

from tests.database import database, pool, server

__all__ = ("database", "pool", "server")
