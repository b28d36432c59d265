"""Prices in compute units. The numbers are data: `config/pricing.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitPrices:
    """`families`: the price of each JSON-RPC method, by chain family."""

    archive_minimum: int
    rest: Mapping[str, int]
    events: Mapping[str, int]
    bundler: Mapping[str, int]
    paymaster: Mapping[str, int]
    families: Mapping[str, Mapping[str, int]]

    def of_family(self, family: str) -> Mapping[str, int]:
        return self.families[family]
