"""Addresses of any family: bytes inside, the family's own text outside."""

from __future__ import annotations

from collections.abc import Callable

from proxy.chains.evm import address as evm
from proxy.chains.svm import address as svm

_PARSE: dict[str, Callable[[str], bytes | None]] = {"evm": evm.parse, "svm": svm.parse}
_SHOW: dict[str, Callable[[bytes], str]] = {"evm": evm.checksum, "svm": svm.show}
FORMS = {"evm": "0x and 40 hex digits", "svm": "32 bytes in base 58"}


def parse(family: str, text: str) -> bytes | None:
    return _PARSE[family](text)


def show(family: str, address: bytes) -> str:
    return _SHOW[family](address)
