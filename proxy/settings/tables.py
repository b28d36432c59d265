"""Loads the data files: chain families, chains, methods, plans, unit prices, providers, wallet proxies and token logos.

They are in config/. An operator's own directory (`data_files.directory`) may add files and replace files of the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import orjson

from proxy.chains.evm.bundler_methods import BUNDLER as BUNDLER_FAMILY
from proxy.chains.family import Family, MethodTable
from proxy.chains.registry import Chain, Network, Registry
from proxy.core.access import USUAL_SAMPLE, Limits
from proxy.core.credits import CreditTable
from proxy.core.pricing import UNITS_OF_AN_ERROR, UnitPrices
from proxy.data_files import CONFIG
from proxy.errors import StartError
from proxy.settings.family_files import load_families
from proxy.settings.listed_chains import find_network, listed_networks, with_listed
from proxy.settings.method_files import load_methods
from proxy.settings.providers import Provider, load_providers
from proxy.settings.schemas import schema_faults
from proxy.settings.toml_files import checked


@dataclass(frozen=True, slots=True)
class Plan:
    requests_per_second: int
    requests_per_day: int
    units_per_second: int
    webhook_deliveries_per_day: int
    webhook_events_per_day: int
    sockets: int
    subscriptions: int
    subscriptions_per_account: int
    webhooks: int
    policies: int
    sponsored_usd_per_day: int
    wallets: int
    # Optional: plans of earlier versions do not have these.
    keys: int = 1_000
    webhook_values_per_day: int = 500_000
    sample_every: int = USUAL_SAMPLE

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
    providers: Mapping[str, Provider]

    def with_networks(self, names: Iterable[str]) -> Tables:
        """These tables, with the listed chains that have these names."""
        chains = with_listed(self.chains, CONFIG, names)
        return self if chains is self.chains else replace(self, chains=chains)

    def with_own_methods(self, services: Collection[str]) -> Tables:
        """These tables, with those JSON-RPC methods that Penstock answers itself whose names begin like these services'."""
        methods = {
            family: {
                name: method for name, method in table.items() if not method.own or name.partition("_")[0] in services
            }
            for family, table in self.methods.items()
        }
        return replace(self, methods=methods)

    def network_names(self) -> list[str]:
        """The ids of all networks, with those of the list."""
        names = [*(each.id for each in self.chains.networks()), *(each.id for each in listed_networks(CONFIG))]
        return list(dict.fromkeys(names))

    def find_network(self, name: str) -> Network | None:
        """The network of a name in any form, such as `base/sepolia`, `base-sepolia` or `84532`."""
        return find_network(self.chains, CONFIG, name)

    def credit_table(self, provider: str) -> CreditTable:
        """The price list of a provider; an empty one if it has none."""
        listed = self.providers.get(provider)
        return (listed.credits if listed is not None else None) or CreditTable()

    def price_of(self, network: str, method: str) -> int | None:
        """The compute units of a JSON-RPC method on a network, or of an operation. None if it has no price. `other` stands
        for methods that do not exist."""
        known = self.chains.find(*network.split("/")) if network.count("/") == 1 else None
        families = () if known is None else (known.family, BUNDLER_FAMILY.name)
        for family in families:
            if method in self.methods[family]:
                return self.methods[family][method].price
        if families and method == "other":
            return UNITS_OF_AN_ERROR
        return self.prices.rest.get(method, self.prices.paymaster.get(method))


def load_tables(config: Path = CONFIG, *, own: str = "") -> Tables:
    """Load all tables, or raise StartError with the faults of every file. `own`: the operator's directory, if there is one."""
    faults: list[str] = []
    directories = DataDirectories(config, Path(own) if own else None)
    faults += directories.faults()
    families = load_families(directories.all("families", "*.toml"), faults)
    files = directories.all("chains", "*.toml")
    chains = [_chain(data, families) for path in files if (data := checked("chain", path, faults))]
    plans = checked("plans", directories.one("plans.toml"), faults)
    prices = checked("pricing", directories.one("pricing.toml"), faults)
    proxies = _proxies(directories.all("factories", "*.json"), faults)
    logos = _logos(directories.all("tokens", "*.json"), faults)
    providers = _providers(config, own, faults)
    faults += _family_faults(chains, families)
    registry = Registry([chain for chain in chains if chain.family in families], families)
    faults += registry.faults()
    methods = load_methods(directories.all("methods", "*.toml"), families, faults)
    if faults:
        raise StartError(faults)
    return Tables(
        registry,
        methods,
        msgspec.convert(plans, dict[str, Plan]),
        msgspec.convert(prices, UnitPrices),
        proxies,
        logos,
        providers,
    )


@cache
def shipped_tables() -> Tables:
    """The tables of a service without its own directory, read once."""
    return load_tables()


def file_versions(own: str) -> frozenset[tuple[Path, int, int]]:
    """The operator's data files with their times and sizes: equal unless one was changed, added or removed."""
    files = [(path, path.stat()) for path in Path(own).rglob("*")] if own else []
    return frozenset((path, stat.st_mtime_ns, stat.st_size) for path, stat in files)


@dataclass(frozen=True, slots=True)
class DataDirectories:
    """The directory of the shipped files and, if there is one, the operator's."""

    shipped: Path
    own: Path | None

    def faults(self) -> Iterator[str]:
        if self.own is not None and not self.own.is_dir():
            yield f"data_files.directory: {self.own} is not a directory: create it, or leave the setting empty"

    def one(self, name: str) -> Path:
        return own if self.own and (own := self.own / name).exists() else self.shipped / name

    def all(self, directory: str, pattern: str) -> list[Path]:
        """All files, by name. The operator's replace shipped ones of the same name."""
        files = {path.name: path for path in (self.shipped / directory).glob(pattern)}
        if self.own:
            files |= {path.name: path for path in (self.own / directory).glob(pattern)}
        return [files[name] for name in sorted(files)]


def _chain(data: Mapping[str, Any], families: Mapping[str, Family]) -> Chain:
    """A chain's file with its defaults: `mainnet` is live, the only test network is the default one, and its family has facts
    that hold for most of its networks."""
    family = families.get(data.get("family", "evm"))
    common = {} if family is None else family.facts
    tests = [name for name in data["networks"] if name != "mainnet"]
    networks = {
        name: {"class": "test" if name in tests else "live", "default": tests == [name], **common, **facts}
        for name, facts in data["networks"].items()
    }
    return msgspec.convert({"title": data["name"].capitalize(), **data, "networks": networks}, Chain)


def _providers(config: Path, own: str, faults: list[str]) -> dict[str, Provider]:
    try:
        return load_providers(own, config)
    except StartError as exc:
        faults += exc.faults
        return {}


def _family_faults(chains: Iterable[Chain], families: Mapping[str, Family]) -> Iterator[str]:
    """Report chains of a family that does not exist."""
    for chain in chains:
        if chain.family not in families:
            yield f"{chain.name}.toml: family: there is no family {chain.family!r}; use one of {', '.join(families)}"


def _proxies(paths: Iterable[Path], faults: list[str]) -> dict[str, bytes]:
    """Load the creation code of the proxy that each factory version deploys."""
    codes = {}
    for path in paths:
        try:
            codes[path.stem] = bytes.fromhex(orjson.loads(path.read_bytes())["creation_code"].removeprefix("0x"))
        except (ValueError, KeyError, AttributeError, TypeError):
            faults.append(f"{path.name}: creation_code: must be bytes in hex")
    return codes


def _logos(paths: Iterable[Path], faults: list[str]) -> dict[tuple[int, str], str]:
    """Load logos by chain id and address from token lists in the Uniswap format; the last list wins."""
    logos: dict[tuple[int, str], str] = {}
    for path in paths:
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
                logos[token["chainId"], address.lower() if address.startswith("0x") else address] = logo
    return logos
