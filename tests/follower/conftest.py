"""The database fixtures, for the tests of what is written from the chain."""

from __future__ import annotations

from tests.database import database, empty_database, pool, server

__all__ = ("database", "empty_database", "pool", "server")
