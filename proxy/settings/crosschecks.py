"""Settings that name a network, held against the tables that know them all; and the keys that paymasters sign with.

They are looked at as plain data, so that whoever has other faults as well hears of all at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from proxy.settings.sections import BundlerSettings, FixedPrice, PaymasterSettings, PriceFeed, UpstreamSettings
from proxy.settings.tables import Tables

# Of secp256k1: a private key is below it.
_CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


# Where networks are named: lists of tables by their place among the settings, and of what kind the tables are.
_NAMING: dict[str, type[UpstreamSettings | BundlerSettings | PaymasterSettings | PriceFeed | FixedPrice]] = {
    "upstreams": UpstreamSettings,
    "bundlers": BundlerSettings,
    "paymasters": PaymasterSettings,
    "prices.feeds": PriceFeed,
    "prices.fixed": FixedPrice,
}
T = TypeVar("T")


def network_faults(tree: Mapping[str, Any], tables: Tables) -> Iterator[str]:
    """Networks that no chain file knows."""
    for name, kind in _NAMING.items():
        for place, each in _listed(tree, name, kind):
            if _is_unknown(each.network, tables):
                yield f"{name}.{place}.network: there is no network {each.network} in config/chains"
    for name in ("follower.networks", "follower.start"):
        for network in _at(tree, name):
            if _is_unknown(network, tables):
                yield f"{name}: there is no network {network} in config/chains"


def _is_unknown(network: Any, tables: Tables) -> bool:
    """What cannot be the name of a network, as `*` and what the schema refuses, is none that is unknown."""
    return isinstance(network, str) and network.count("/") == 1 and tables.chains.find(*network.split("/")) is None


def _at(tree: Mapping[str, Any], name: str) -> Any:
    """What stands there, if it can be gone through."""
    found: Any = tree
    for step in name.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping | list | tuple) else ()


def _listed(tree: Mapping[str, Any], name: str, kind: type[T]) -> Iterator[tuple[int, T]]:
    """The tables of a list that are whole, with their places; of the others the schema says what they lack."""
    for place, each in enumerate(_at(tree, name)):
        with suppress(msgspec.ValidationError):
            yield place, msgspec.convert(each, kind, strict=False)


def signer_key(paymaster: PaymasterSettings, environ: Mapping[str, str]) -> bytes:
    """The 32 bytes that the paymaster's signatures are made with; ValueError says what is wrong, never what was found."""
    named = paymaster.signer_env or paymaster.signer_file
    try:
        text = environ[named] if paymaster.signer_env else Path(named).read_text("ascii")
    except (KeyError, OSError, ValueError):
        raise ValueError(f"there is no signer's key in {named or 'signer_env or signer_file'}") from None
    digits = text.strip().removeprefix("0x")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digits, re.ASCII) or not 0 < int(digits, 16) < _CURVE_ORDER:
        raise ValueError(f"what is in {named} is no private key: 0x and 64 hex digits")
    return bytes.fromhex(digits)


def paymaster_faults(tree: Mapping[str, Any], tables: Tables, environ: Mapping[str, str]) -> Iterator[str]:
    """Paymasters of entry points that their chain has not, two for one, and signers whose key is not there."""
    seen: set[tuple[str, str]] = set()
    for place, each in _listed(tree, "paymasters", PaymasterSettings):
        network = tables.chains.find(*each.network.split("/")) if each.network.count("/") == 1 else None
        name = f"paymasters.{place}"
        if network is not None and each.entry_point not in network.chain.entry_points:
            yield f"{name}.entry_point: {each.network} has no entry point {each.entry_point}"
        if (each.network, each.entry_point) in seen:
            yield f"{name}: there is another paymaster for entry point {each.entry_point} of {each.network}"
        seen.add((each.network, each.entry_point))
        try:
            signer_key(each, environ)
        except ValueError as exc:
            yield f"{name}: {exc}"
