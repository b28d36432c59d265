"""Settings that name a network, held against the tables that know them all; and the keys that paymasters sign with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from proxy.settings.sections import Bundler, FixedPrice, Paymaster, PriceFeed, Settings, Upstream
from proxy.settings.tables import Tables

# Of secp256k1: a private key is below it.
_CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def upstream_faults(settings: Settings, tables: Tables) -> list[str]:
    """Upstreams and prices of networks that no chain file knows."""
    named: dict[str, tuple[Upstream | Bundler | Paymaster | PriceFeed | FixedPrice, ...]] = {
        "upstreams": settings.upstreams,
        "bundlers": settings.bundlers,
        "paymasters": settings.paymasters,
        "prices.feeds": settings.prices.feeds,
        "prices.fixed": settings.prices.fixed,
    }
    return [
        f"{name}.{place}.network: there is no network {each.network} in config/chains"
        for name, found in named.items()
        for place, each in enumerate(found)
        if tables.chains.find(*each.network.split("/")) is None
    ] + [
        f"follower.networks: there is no network {name} in config/chains"
        for name in (*settings.follower.networks, *settings.follower.start)
        if name != "*" and tables.chains.find(*name.split("/")) is None
    ]


def signer_key(paymaster: Paymaster, environ: Mapping[str, str]) -> bytes:
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


def paymaster_faults(settings: Settings, tables: Tables, environ: Mapping[str, str]) -> Iterator[str]:
    """Paymasters of entry points that their chain has not, two for one, and signers whose key is not there."""
    seen: set[tuple[str, str]] = set()
    for place, each in enumerate(settings.paymasters):
        network = tables.chains.find(*each.network.split("/"))
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
