"""The database fixtures, for services that are tested together with their store."""

from __future__ import annotations

from tests.database import database, pool, server

__all__ = ("database", "pool", "server")
