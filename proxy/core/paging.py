"""Pages of a list: the API's `page`, `limit` and `total`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    number: int
    limit: int

    @property
    def offset(self) -> int:
        return (self.number - 1) * self.limit
