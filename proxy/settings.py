"""TOML and the environment -> frozen settings.

Order: `config/default.toml`, then the operator's file, then the environment. What the values may be is written in
`schemas/config/*.json`; everything wrong is collected and reported at once, each fault with the name of its key.
Only this room reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jsonschema_rs
import msgspec
import orjson

from proxy.chains.registry import Chain, Registry
from proxy.core.access import Limits
from proxy.core.pricing import Prices
from proxy.errors import StartError

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "config"
SCHEMAS = ROOT / "schemas"
PREFIX = "PENSTOCK_"
# Settings whose value is never printed.
SECRETS = frozenset({"database.url", "keys.pepper", "upstreams.url"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    workers: int
    dev: bool
    head_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    keepalive_s: float
    keepalive_requests: int
    max_head_bytes: int
    max_body_bytes: int
    max_connections: int
    connections_per_address: int
    drain_s: float
    trusted_proxies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Database:
    url: str
    pool_size: int
    acquire_timeout_s: float


@dataclass(frozen=True, slots=True)
class Keys:
    pepper: str
    reload_s: float
    auth_failures_per_minute: int


@dataclass(frozen=True, slots=True)
class Quotas:
    chunk: int
    flush_s: float


@dataclass(frozen=True, slots=True)
class Log:
    level: str
    access: bool


@dataclass(frozen=True, slots=True)
class Upstream:
    network: str
    url: str


@dataclass(frozen=True, slots=True)
class Plan:
    requests_per_second: int
    requests_per_day: int
    units_per_second: int
    webhook_deliveries_per_day: int
    sockets: int
    subscriptions: int
    webhooks: int
    policies: int
    wallets: int

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_second, self.units_per_second, self.requests_per_day)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that an operator can decide. `tree` is the same as plain data, to print or to hand to a worker."""

    server: Server
    metrics: Metrics
    database: Database
    keys: Keys
    quotas: Quotas
    log: Log
    upstreams: tuple[Upstream, ...]
    tree: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """The data files: chains, plans and prices."""

    chains: Registry
    plans: Mapping[str, Plan]
    prices: Prices


def load(
    path: Path | None = None, *, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> Settings:
    """The effective settings, or a StartError with every fault."""
    tree = _read(CONFIG / "default.toml")
    if path is not None:
        tree = _merged(tree, _read(path))
    tree, faults = _with_environment(tree, environ)
    tree = _merged(tree, overrides or {})
    return from_tree(tree, faults=faults)


def from_tree(tree: Mapping[str, Any], *, faults: list[str] | None = None) -> Settings:
    found = list(faults or ())
    found += _schema_faults("settings", tree)
    if not found:
        found += _network_faults(tree)
    if found:
        raise StartError(found)
    return msgspec.convert({"upstreams": [], **tree, "tree": tree}, Settings)


def load_tables(config: Path = CONFIG) -> Tables:
    """Chains, plans and prices, or a StartError with every fault of every file."""
    faults: list[str] = []
    files = sorted((config / "chains").glob("*.toml"))
    chains = [msgspec.convert(data, Chain) for path in files if (data := _checked("chain", path, faults))]
    plans = _checked("plans", config / "plans.toml", faults)
    prices = _checked("pricing", config / "pricing.toml", faults)
    registry = Registry(chains)
    faults += registry.faults()
    if faults:
        raise StartError(faults)
    return Tables(registry, msgspec.convert(plans, dict[str, Plan]), msgspec.convert(prices, Prices))


def masked(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each setting with its value as it may be shown."""
    for name, value in _leaves(settings.tree):
        secret = name in SECRETS or f"{name.split('.')[0]}.{name.rsplit('.', 1)[-1]}" in SECRETS
        yield name, "********" if secret and value else str(orjson.dumps(value), "utf-8")


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list | tuple) and tree and isinstance(tree[0], Mapping):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{place}")
    else:
        yield name, tree


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise StartError([f"{path}: cannot be read: {exc.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise StartError([f"{path}: not valid TOML: {exc}"]) from None


def _checked(schema: str, path: Path, faults: list[str]) -> dict[str, Any]:
    data = _read(path)
    found = [f"{path.name}: {fault}" for fault in _schema_faults(schema, data)]
    faults += found
    return {} if found else data


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return out


def _with_environment(tree: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """PENSTOCK_SECTION__KEY=value, read as the type that the key already has. DATABASE_URL is understood as well."""
    faults: list[str] = []
    tree = {section: dict(values) if isinstance(values, Mapping) else values for section, values in tree.items()}
    if url := environ.get("DATABASE_URL"):
        tree["database"]["url"] = url
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        section, _, key = name.removeprefix(PREFIX).lower().partition("__")
        known = tree.get(section)
        if not isinstance(known, dict) or key not in known:
            faults.append(
                f"{name}: there is no setting {section}.{key}" if key else f"{name}: write {PREFIX}SECTION__KEY"
            )
            continue
        known[key] = _typed(text, known[key])
    return tree, faults


def _typed(text: str, like: Any) -> Any:
    """The text as a TOML value of the default's type; what does not read stays text, and the schema names it."""
    if isinstance(like, str):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return float(value) if isinstance(like, float) and isinstance(value, int) else value


def _schema_faults(name: str, data: Mapping[str, Any]) -> list[str]:
    schema = orjson.loads((SCHEMAS / "config" / f"{name}.json").read_bytes())
    validator = jsonschema_rs.Draft202012Validator(schema)
    return sorted({_fault_text(error) for error in validator.iter_errors(dict(data))})


# A secret's value must not reach the terminal through a message about it.
_FAULT_WORDS: dict[tuple[str, ...], str] = {
    ("database", "url"): "must be a postgresql:// address (set it in the file or in DATABASE_URL)",
    ("keys", "pepper"): "must be 32 or more random characters (set it in the file or in PENSTOCK_KEYS__PEPPER)",
}


def _fault_text(error: jsonschema_rs.ValidationError) -> str:
    path = tuple(str(step) for step in error.instance_path)
    words = _FAULT_WORDS.get(path[:2])
    if words is None and path and path[-1] == "url":
        words = "must be an http:// or https:// address"
    return f"{'.'.join(path) or 'settings'}: {words or error.message}"


def _network_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    for place, text in enumerate(tree["server"]["trusted_proxies"]):
        try:
            ipaddress.ip_network(text)
        except ValueError as exc:
            yield f"server.trusted_proxies.{place}: {exc}"


def upstream_faults(settings: Settings, tables: Tables) -> list[str]:
    """Upstreams of networks that no chain file knows."""
    return [
        f"upstreams.{place}.network: there is no network {upstream.network} in config/chains"
        for place, upstream in enumerate(settings.upstreams)
        if tables.chains.find(*upstream.network.split("/")) is None
    ]


def environment() -> Mapping[str, str]:
    return os.environ
