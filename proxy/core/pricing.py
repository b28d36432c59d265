"""What a call costs, in compute units. The numbers are data: `config/pricing.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitPrices:
    archive_minimum: int
    rest: Mapping[str, int]
    events: Mapping[str, int]
    bundler: Mapping[str, int]
    paymaster: Mapping[str, int]
    evm: Mapping[str, int]
    svm: Mapping[str, int]

    def of_family(self, family: str) -> Mapping[str, int]:
        return {"evm": self.evm, "svm": self.svm}[family]
