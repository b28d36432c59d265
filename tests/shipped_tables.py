"""The tables of chains, methods, prices and plans that this repository ships, read once for all tests."""

from __future__ import annotations

from proxy.settings import load_tables

TABLES = load_tables()
