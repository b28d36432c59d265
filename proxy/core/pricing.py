"""Prices in compute units, other than those of JSON-RPC methods. The numbers are data: `config/pricing.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitPrices:
    archive_minimum: int
    rest: Mapping[str, int]
    events: Mapping[str, int]
    paymaster: Mapping[str, int]
