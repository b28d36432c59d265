"""Loads the data files in config/: chains, methods, plans, unit prices, wallet proxies and token logos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import orjson

from proxy.chains.families import FAMILIES
from proxy.chains.family import MethodTable
from proxy.chains.registry import Chain, Registry
from proxy.core.access import Limits
from proxy.core.pricing import UnitPrices
from proxy.data_files import CONFIG
from proxy.errors import StartError
from proxy.settings.method_files import load_methods
from proxy.settings.schemas import schema_faults
from proxy.settings.toml_files import checked


@dataclass(frozen=True, slots=True)
class Plan:
    requests_per_second: int
    requests_per_day: int
    units_per_second: int
    webhook_deliveries_per_day: int
    sockets: int
    subscriptions: int
    subscriptions_per_account: int
    webhooks: int
    policies: int
    sponsored_usd_per_day: int
    wallets: int
    # Optional: plans of earlier versions do not have it.
    keys: int = 1_000

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_second, self.units_per_second, self.requests_per_day)


@dataclass(frozen=True, slots=True)
class Tables:
    """The data files. `methods`: by family. `proxies`: creation code of wallet proxies by version. `logos`: by chain id and
    token address."""

    chains: Registry
    methods: Mapping[str, MethodTable]
    plans: Mapping[str, Plan]
    prices: UnitPrices
    proxies: Mapping[str, bytes]
    logos: Mapping[tuple[int, str], str]


def load_tables(config: Path = CONFIG) -> Tables:
    """Load all tables, or raise StartError with the faults of every file."""
    faults: list[str] = []
    files = sorted((config / "chains").glob("*.toml"))
    chains = [msgspec.convert(data, Chain) for path in files if (data := checked("chain", path, faults))]
    plans = checked("plans", config / "plans.toml", faults)
    prices = checked("pricing", config / "pricing.toml", faults)
    proxies = _proxies(config / "factories", faults)
    logos = _logos(config / "tokens", faults)
    registry = Registry(chains)
    faults += registry.faults()
    faults += _family_faults(registry)
    methods = load_methods(config / "methods", faults)
    if faults:
        raise StartError(faults)
    return Tables(
        registry,
        methods,
        msgspec.convert(plans, dict[str, Plan]),
        msgspec.convert(prices, UnitPrices),
        proxies,
        logos,
    )


def _family_faults(registry: Registry) -> Iterator[str]:
    """Report chains of a family that does not exist."""
    for chain in registry.chains.values():
        if chain.family not in FAMILIES:
            yield f"{chain.name}.toml: family: there is no family {chain.family!r}; use one of {', '.join(FAMILIES)}"


def _proxies(directory: Path, faults: list[str]) -> dict[str, bytes]:
    """Load the creation code of the proxy that each factory version deploys."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            found[path.stem] = bytes.fromhex(orjson.loads(path.read_bytes())["creation_code"].removeprefix("0x"))
        except (ValueError, KeyError, AttributeError, TypeError):
            faults.append(f"{path.name}: creation_code: must be bytes in hex")
    return found


def _logos(directory: Path, faults: list[str]) -> dict[tuple[int, str], str]:
    """Load logos by chain id and address from token lists in the Uniswap format; the last list wins."""
    found: dict[tuple[int, str], str] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            data = orjson.loads(path.read_bytes())
        except ValueError as exc:
            faults.append(f"{path.name}: not valid JSON: {exc}")
            continue
        wrong = schema_faults("tokens", data) if isinstance(data, dict) else ["must be an object"]
        faults += [f"{path.name}: {fault}" for fault in wrong]
        for token in () if wrong else data["tokens"]:
            if logo := token.get("logoURI"):
                address = token["address"]
                found[token["chainId"], address.lower() if address.startswith("0x") else address] = logo
    return found
